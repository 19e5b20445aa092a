"""Graphs as arrays, in the file format of OpenFst's "const" transducers, which processes map.

A file is a header, then the states, then the arcs of all states in order; both begin at a multiple
of 16 bytes. OpenFst's and Kaldi's own programs read it. What maps a file shares its pages with all
other processes of the host. kaldifst has no reader of these files, so what it computes comes here
by one file, and goes there by another, of OpenFst's "vector" transducers.
"""

import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import kaldifst
import numpy as np

STATE = np.dtype(
    [
        ("final_cost", "<f4"),  # infinite: no path ends here
        ("first_arc", "<u4"),
        ("num_arcs", "<u4"),
        ("num_input_epsilons", "<u4"),
        ("num_output_epsilons", "<u4"),
    ]
)
ARC = np.dtype(
    [("input_label", "<i4"), ("output_label", "<i4"), ("cost", "<f4"), ("target", "<i4")]
)

_MAGIC = 2125659606
_STANDARD = b"\x08\0\0\0standard"
_CONST, _VECTOR = b"\x05\0\0\0const" + _STANDARD, b"\x06\0\0\0vector" + _STANDARD
_VERSION, _IS_ALIGNED = 2, 4
_EXPANDED, _MUTABLE = 1, 2  # OpenFst's properties of its kinds
_ALIGNMENT = 16


def _header(types: bytes) -> struct.Struct:
    """Return the header: magic, types, version, flags, properties, start, states, arcs."""
    return struct.Struct(f"<i{len(types)}siiQqqq")


@dataclass(frozen=True, slots=True, eq=False)
class ConstFst:
    """ConstFst is a weighted transducer: `states` (STATE) and `arcs` (ARC), those of state 0 first.

    The arcs of a state are in order of their input labels, so that its epsilons are first.
    """

    start: int
    states: np.ndarray
    arcs: np.ndarray

    @classmethod
    def of(
        cls, sources: np.ndarray, arcs: np.ndarray, final_costs: np.ndarray, start: int
    ) -> "ConstFst":
        """Sort arcs by source and input label; `final_costs` has an element for each state."""
        order = np.lexsort((arcs["output_label"], arcs["input_label"], sources))
        arcs, sources = arcs[order], sources[order]
        states = np.zeros(len(final_costs), STATE)
        states["final_cost"] = final_costs
        num_states = len(states)
        states["num_arcs"] = np.bincount(sources, minlength=num_states)
        states["first_arc"] = np.cumsum(states["num_arcs"], dtype=np.int64) - states["num_arcs"]
        for side in ("input", "output"):
            of_epsilons = sources[arcs[f"{side}_label"] == 0]
            states[f"num_{side}_epsilons"] = np.bincount(of_epsilons, minlength=num_states)
        return cls(start, states, arcs)

    @property
    def sources(self) -> np.ndarray:
        """Return the source of each arc."""
        return np.repeat(np.arange(len(self.states), dtype=np.int32), self.states["num_arcs"])

    def to_bytes(self) -> bytes:
        """Return OpenFst's file."""
        numbers = self.start, len(self.states), len(self.arcs)
        header = _header(_CONST)
        parts: list[bytes | memoryview] = [
            header.pack(_MAGIC, _CONST, _VERSION, _IS_ALIGNED, _EXPANDED, *numbers)
        ]
        for array in (self.states, self.arcs):
            parts.append(bytes(-sum(map(len, parts)) % _ALIGNMENT))
            # Views: a copy of a large graph's arcs would be gigabytes.
            parts.append(np.ascontiguousarray(array).data.cast("B") if len(array) else b"")
        return b"".join(parts)

    @classmethod
    def mapped(cls, path: Path) -> "ConstFst":
        """Map a file that is not changed while it is used; ValueError if it is none of ours."""
        if not path.stat().st_size:
            raise ValueError(f"{path}: 0 bytes: need a graph: build it again")
        return cls.in_bytes(np.memmap(path, np.uint8, "r"), str(path))

    @classmethod
    def in_bytes(cls, data: bytes | np.ndarray, name: str) -> "ConstFst":
        """View the bytes of a file that has this name; ValueError if it is none of ours.

        What states and arcs say is not looked at.
        """
        held = np.frombuffer(data, np.uint8)
        header = _header(_CONST)
        if len(held) < header.size:
            raise ValueError(f"{name}: {len(held)} bytes: need a graph: build it again")
        first = held[: header.size].tobytes()
        magic, types, version, flags, _, start, num_states, num_arcs = header.unpack(first)
        if (magic, types, version) != (_MAGIC, _CONST, _VERSION) or flags & ~_IS_ALIGNED:
            raise ValueError(f"{name}: no const transducer of OpenFst: build it again")
        alignment = _ALIGNMENT if flags & _IS_ALIGNED else 1
        first_state = header.size + -header.size % alignment
        end = first_state + num_states * STATE.itemsize
        first_arc = end + -end % alignment
        is_whole = len(held) == first_arc + num_arcs * ARC.itemsize
        if not (is_whole and num_states >= 0 and num_arcs >= 0):
            raise ValueError(f"{name}: {len(held)} bytes: cut off: build it again")
        return cls(start, held[first_state:end].view(STATE), held[first_arc:].view(ARC))

    @classmethod
    def of_kaldifst(cls, fst: kaldifst.StdVectorFst) -> "ConstFst":
        """Copy a transducer of kaldifst, whose arcs need no order."""
        with tempfile.NamedTemporaryFile() as file:
            if not kaldifst.StdConstFst(fst).write(file.name):
                said = f"no room for a graph in {tempfile.gettempdir()}"
                raise OSError(f"{said}: make room, or set TMPDIR to another folder")
            found = cls.mapped(Path(file.name))
            return cls.of(found.sources, found.arcs, found.states["final_cost"], found.start)

    def to_kaldifst(self) -> kaldifst.StdVectorFst:
        """Copy it for kaldifst's algorithms."""
        num_states, num_arcs = len(self.states), len(self.arcs)
        # In words of 4 bytes: a state's final cost and number of arcs, an int64; then its arcs.
        words = np.zeros(3 * num_states + 4 * num_arcs, np.int32)
        of_states = 3 * np.arange(num_states) + 4 * self.states["first_arc"].astype(np.int64)
        words[of_states] = np.ascontiguousarray(self.states["final_cost"]).view(np.int32)
        words[of_states + 1] = self.states["num_arcs"]
        of_arcs = 3 * (self.sources.astype(np.int64) + 1) + 4 * np.arange(num_arcs)
        words[of_arcs[:, None] + np.arange(4)] = (
            np.ascontiguousarray(self.arcs).view(np.int32).reshape(num_arcs, 4)
        )
        header = _header(_VECTOR).pack(
            *(_MAGIC, _VECTOR, _VERSION, 0, _EXPANDED | _MUTABLE),
            *(self.start, num_states, num_arcs),
        )
        with tempfile.NamedTemporaryFile() as file:
            file.write(header)
            file.write(words.data)
            file.flush()
            return kaldifst.StdVectorFst.read(file.name)
