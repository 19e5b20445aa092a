"""The lattice shard: competing senone sequences of labelled utterances (003 VII-C3).

A row names its utterance's row in the training partition, which holds features and alignment. Cells
are packed: bytes by zstd, and whole numbers in as few bytes as their largest needs. A cell unpacks
to at most MAX_RATIO times its size, so that none exhausts memory.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int32, Int64, Integer, UInt16

from pipeline.filterbank import FRAME_SHIFT_MS, STACK
from pipeline.settings import LATTICE_OFFSET
from pipeline.shards.container import (
    FLOAT32,
    Format,
    Row,
    read_columns,
    read_rows,
    required,
    write_rows,
)

MAX_RATIO = 64
_PLAIN, _ZSTD = b"\0", b"\1"
_WIDTHS = (1, 2, 4)
_CODEC = pa.Codec("zstd", compression_level=3)


def pack(raw: bytes) -> bytes:
    """Pack bytes; those that zstd does not shrink, or shrinks more than a reader allows, stay."""
    packed: bytes = _CODEC.compress(raw, asbytes=True)
    is_smaller = len(packed) < len(raw) <= MAX_RATIO * len(packed)
    return _ZSTD + packed if is_smaller else _PLAIN + raw


def unpack(cell: bytes, num_bytes: int, where: str) -> bytes:
    """Unpack exactly `num_bytes`; ValueError for a cell that holds others, or too many."""
    kind, body = cell[:1], cell[1:]
    if kind == _PLAIN and len(body) == num_bytes:
        return body
    if kind != _ZSTD or not 0 <= num_bytes <= MAX_RATIO * len(body):
        raise ValueError(f"{where}: {len(cell)} packed bytes: need {num_bytes} in them")
    try:
        found: bytes = _CODEC.decompress(body, num_bytes, asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{where}: {len(cell)} packed bytes: {error}") from error
    return found


def pack_integers(values: Integer[np.ndarray, " values"], where: str) -> bytes:
    """Pack whole numbers from 0 to 2^32 - 1; ValueError for others."""
    least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if least < 0 or most >= 1 << 32:
        raise ValueError(f"{where}: {least}..{most}: need 0..{(1 << 32) - 1}")
    width = next(each for each in _WIDTHS if most < 1 << (8 * each))
    return bytes([width]) + pack(values.astype(f"<u{width}").tobytes())


def unpack_integers(cell: bytes, count: int, most: int, where: str) -> Int64[np.ndarray, " values"]:
    """Unpack `count` whole numbers up to `most`; ValueError for a cell that holds others."""
    width = cell[0] if cell else 0
    if width not in _WIDTHS:
        raise ValueError(f"{where}: numbers of {width} bytes: need one of {_WIDTHS}")
    raw = unpack(cell[1:], count * width, where)
    values = np.frombuffer(raw, f"<u{width}").astype(np.int64)
    if count and values.max() > most:
        raise ValueError(f"{where}: {values.max()}: need at most {most}")
    return values


# States of a level and frames since the last one; arcs of a state; of an arc the number of states
# to its target, its label and its cost.
_CELLS = ("level_sizes", "level_steps", "degrees", "strides", "labels", "graph_costs")

_MOST, _MOST_LABELS = 2**31 - 1, 2**16 - 1
_FORMAT = Format(
    pa.schema(
        [
            required("utterance_id", pa.string()),
            required("duration_ms", pa.int64()),
            required("row", pa.int32()),
            required("num_levels", pa.int32()),
            required("num_arcs", pa.int32()),
            # An arc of AN4's lattices takes 2.5 bytes, and 15 unpacked: 1.2 kB a second of speech.
            *(required(name, pa.binary()) for name in _CELLS),
        ]
    ),
    {
        "shard": "lattices",
        "frame_shift_ms": str(STACK * FRAME_SHIFT_MS),
        "offset": str(LATTICE_OFFSET),
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Lattice holds competing senone sequences of one utterance, and their graph costs.

    States are numbered level by level, from the start, alone in level 0, to the end, alone in the
    last. `level_frames` counts the low-rate frames read before each level. Arcs are sorted by
    source and lead to later levels; label s + 1 reads a frame as senone s, label 0 reads none.
    """

    level_sizes: Int32[np.ndarray, " levels"]
    level_frames: Int32[np.ndarray, " levels"]
    sources: Int32[np.ndarray, " arcs"]
    targets: Int32[np.ndarray, " arcs"]
    labels: UInt16[np.ndarray, " arcs"]
    graph_costs: Float32[np.ndarray, " arcs"]

    @property
    def num_frames(self) -> int:
        """Return the number of low-rate frames that every path reads."""
        return int(self.level_frames[-1])

    @property
    def num_states(self) -> int:
        """Return the number of states."""
        return int(self.level_sizes.sum())

    @property
    def state_levels(self) -> Int64[np.ndarray, " states"]:
        """Return the level of each state."""
        return np.repeat(np.arange(len(self.level_sizes)), self.level_sizes)


@dataclass(frozen=True, slots=True, eq=False)
class LatticeRow:
    """LatticeRow: the lattice of the utterance in row `row` of a training partition."""

    utterance_id: str
    duration_ms: int
    row: int
    lattice: Lattice


def write_lattices(rows: Sequence[LatticeRow]) -> bytes:
    """Write a lattice shard; its rows are in the order of the training partition."""
    _require_order([row.row for row in rows])
    return write_rows(_FORMAT, map(_to_cells, rows))


def read_lattices(data: bytes, chosen: Sequence[int] | None = None) -> list[LatticeRow]:
    """Read a lattice shard in stored order, or its rows `chosen` by number.

    ValueError for damaged bytes and broken lattices.
    """
    cells, _ = read_rows(_FORMAT, data, chosen)
    rows = [_from_cells(row) for row in cells]
    numbers = [row.row for row in rows]
    # Rows that are chosen come in the order of the choice.
    _require_order(numbers if chosen is None else sorted(numbers))
    return rows


def read_lattice_rows(file: BinaryIO | io.IOBase) -> Int64[np.ndarray, " lattices"]:
    """Read only the numbers of the training partition's rows that have lattices."""
    column = read_columns(_FORMAT, file, ("row",))["row"]
    rows: Int64[np.ndarray, " lattices"] = column.to_numpy().astype(np.int64)
    _require_order(rows.tolist())
    return rows


def check_lattice(lattice: Lattice, where: str) -> None:
    """Raise ValueError unless every arc is on a path from the start to the end."""
    sizes, frames = lattice.level_sizes, lattice.level_frames
    sources, targets, labels = lattice.sources, lattice.targets, lattice.labels
    num_states = int(sizes.sum(dtype=np.int64))
    _require(len(sizes) > 1 and sizes.min() > 0, where, "levels of one state or more")
    _require(sizes[0] == sizes[-1] == 1 and frames[0] == 0, where, "one start and one end")
    _require((np.diff(frames) >= 0).all(), where, "frames that ascend with the levels")
    _require(num_states <= 2 * len(sources), where, "no more states than its arcs have ends")
    ends = np.concatenate([sources, targets])
    _require(ends.min() >= 0 and ends.max() < num_states, where, "states that the levels number")
    _require((np.diff(sources) >= 0).all(), where, "arcs sorted by source")
    level = lattice.state_levels
    _require((level[sources] < level[targets]).all(), where, "arcs to later levels")
    passed = frames[level[targets]] - frames[level[sources]]
    _require((passed == (labels > 0)).all(), where, "a frame for each label, none for 0")
    everywhere = np.arange(num_states)
    _require(np.array_equal(np.unique(sources), everywhere[:-1]), where, "ways on from all states")
    _require(np.array_equal(np.unique(targets), everywhere[1:]), where, "ways to all states")
    _require(bool(np.isfinite(lattice.graph_costs).all()), where, "finite graph costs")


def _require(holds: bool | np.bool_, where: str, need: str) -> None:
    if not holds:
        raise ValueError(f"{where}: a broken lattice: need {need}")


def _require_order(rows: list[int]) -> None:
    for before, row in zip([-1, *rows], rows, strict=False):
        if row <= before:
            raise ValueError(
                f"lattices: row {row} after row {before}: need each row of the training partition "
                "once, in order, from 0: remove the lattices' folder and decode again"
            )


def _to_cells(row: LatticeRow) -> Row:
    where, lattice = row.utterance_id, row.lattice
    check_lattice(lattice, where)
    counted = {
        "level_sizes": lattice.level_sizes,
        "level_steps": np.diff(lattice.level_frames, prepend=0),
        "degrees": np.bincount(lattice.sources, minlength=lattice.num_states),
        "strides": lattice.targets - lattice.sources,
        "labels": lattice.labels,
    }
    cells = {name: pack_integers(values, f"{where} {name}") for name, values in counted.items()}
    cells["graph_costs"] = pack(lattice.graph_costs.astype(FLOAT32).tobytes())
    return {
        "utterance_id": where,
        "duration_ms": row.duration_ms,
        "row": row.row,
        "num_levels": len(lattice.level_sizes),
        "num_arcs": len(lattice.sources),
        **cells,
    }


def _from_cells(cells: dict[str, Any]) -> LatticeRow:
    where, num_arcs = cells["utterance_id"], cells["num_arcs"]

    def numbers(name: str, count: int, most: int = _MOST) -> Int64[np.ndarray, " numbers"]:
        return unpack_integers(cells[name].to_pybytes(), count, most, f"{where} {name}")

    sizes = numbers("level_sizes", cells["num_levels"])
    degrees = numbers("degrees", int(sizes.sum()))
    _require(int(degrees.sum()) == num_arcs, where, f"{num_arcs} arcs that leave its states")
    sources = np.repeat(np.arange(len(degrees)), degrees)
    targets = sources + numbers("strides", num_arcs)
    _require(bool((targets < len(degrees)).all()), where, "states that the levels number")
    costs = unpack(cells["graph_costs"].to_pybytes(), num_arcs * FLOAT32.itemsize, where)
    lattice = Lattice(
        level_sizes=sizes.astype(np.int32),
        level_frames=np.cumsum(numbers("level_steps", cells["num_levels"], 1)).astype(np.int32),
        sources=sources.astype(np.int32),
        targets=targets.astype(np.int32),
        labels=numbers("labels", num_arcs, _MOST_LABELS).astype(np.uint16),
        graph_costs=np.frombuffer(costs, FLOAT32),
    )
    check_lattice(lattice, where)
    return LatticeRow(where, cells["duration_ms"], cells["row"], lattice)
