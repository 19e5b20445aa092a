"""Search decoding graphs by `search.c`: best paths, and lattices of the paths near them.

A search reads the graph's arrays in place, so that processes may share a mapped file, and does not
hold the GIL.
"""

import ctypes
import weakref

import numpy as np
from jaxtyping import Float32, UInt32

from pipeline.compiled_library import compiled_library
from training.decode.const_fst import ARC, STATE, ConstFst

SEARCH_ARC = np.dtype(
    [
        ("source", "<i4"),
        ("target", "<i4"),
        ("label", "<i4"),  # senone + 1, or 0 for an arc that reads no frame
        ("word", "<i4"),  # 0 for none
        ("graph_cost", "<f4"),
        ("acoustic_cost", "<f4"),
    ]
)
"""An arc of a lattice: states have topological numbers from 0, the start, to one end.

Arcs into the end read no frame, and have final states' costs.
"""

MAX_LATTICE_ARCS = 2**24
"""The most arcs of a lattice, rescored ones too: 0.3 GB in a search, 1 GB while they are read."""

_NO_MEMORY, _TOO_MANY_ARCS, _EPSILON_CYCLE = -1, -2, -3
_WRONG_GRAPH = {
    -4: "no such start",
    -5: "arcs beyond the graph's",
    -6: "arcs that are not in order of their input labels",
    -7: "an arc to a state beyond the graph's",
    -8: "an input label beyond the senones",
    -9: "an output label beyond the words",
    -10: "a cost that is not finite",
    -11: "a cycle of arcs that read no frame, one of them with a negative cost",
}


class _Graph(ctypes.Structure):
    _fields_ = (
        ("states", ctypes.c_void_p),
        ("arcs", ctypes.c_void_p),
        ("num_states", ctypes.c_int64),
        ("num_arcs", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("num_labels", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
    )


_pointer, _number, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_C = compiled_library(
    "training.decode._search",
    {
        "check_graph": (_number, _pointer, _pointer),
        "new_search": (_pointer, _pointer, _double, _number, _double, _number),
        "free_search": (None, _pointer),
        "advance": (_number, _pointer, _pointer, _number),
        "has_complete_path": (_number, _pointer),
        "best_path": (_number, _pointer, _number, _pointer, _number),
        "end_lattice": (_number, _pointer),
        "read_lattice": (None, _pointer, _pointer),
    },
)


def _library() -> ctypes.CDLL:
    if _C is None:
        raise ValueError(
            "training/decode/search.c is not compiled: install a wheel of megahour, or a C "
            "compiler and then megahour again"
        )
    return _C


class TooManyArcsError(ValueError):
    """TooManyArcsError reports a lattice for which memory has no room by any beam."""


class SearchableGraph:
    """SearchableGraph is a graph whose arcs C has checked once, so that searches may follow them.

    Labels are 0 for none or a column of scores + 1. Raises ValueError for a graph that is not
    whole, and where installation compiled no C.
    """

    def __init__(self, fst: ConstFst, num_senones: int, num_words: int) -> None:
        states = np.ascontiguousarray(fst.states, STATE)
        arcs = np.ascontiguousarray(fst.arcs, ARC)
        self.fst, self.num_senones = ConstFst(fst.start, states, arcs), num_senones
        self.address = _Graph(
            *(states.ctypes.data, arcs.ctypes.data, len(states), len(arcs)),
            *(fst.start, num_senones, num_words),
        )
        where = ctypes.c_int64()
        status = _library().check_graph(ctypes.byref(self.address), ctypes.byref(where))
        if status == _NO_MEMORY:
            raise MemoryError(f"no memory to check a graph of {len(states)} states")
        if status:
            wrong = _WRONG_GRAPH[status]
            raise ValueError(f"graph: state {where.value}: {wrong}: build the graph again")


class Search:
    """Search passes tokens over a graph while scores arrive; pieces of any lengths give the same.

    Of the states within `beam` of the best, the `max_active` best go on. With a `lattice_beam` the
    search keeps a lattice too. Ties are broken by states' numbers and the order of arcs, so equal
    scores have equal paths everywhere.
    """

    def __init__(
        self,
        graph: SearchableGraph,
        beam: float,
        max_active: int,
        lattice_beam: float | None = None,
    ) -> None:
        self._graph, self._c = graph, _library()
        self._keeps_lattice, self._has_ended = lattice_beam is not None, False
        of_lattice = -1.0 if lattice_beam is None else lattice_beam
        self._pointer = self._c.new_search(
            ctypes.byref(graph.address), beam, max_active, of_lattice, MAX_LATTICE_ARCS
        )
        if not self._pointer:
            raise MemoryError("no memory for a search")
        weakref.finalize(self, self._c.free_search, self._pointer)
        self.num_frames = 0

    def advance(self, scores: Float32[np.ndarray, "frames senones"]) -> None:
        """Search the next frames.

        Memory bounds the lattice: where it has too many arcs, its beam is halved, and where that
        does not help there is a TooManyArcsError. Raises ValueError for scores that are not the
        graph's, or not finite, and after `end_lattice`.
        """
        if self._has_ended:
            raise ValueError("the search has ended: begin another for more frames")
        num_columns = scores.shape[1]
        if num_columns != self._graph.num_senones:
            raise ValueError(f"{num_columns} senones: need {self._graph.num_senones}, the graph's")
        if not np.isfinite(scores).all():
            raise ValueError("log-likelihoods are not finite: check the acoustic model's output")
        scores = np.ascontiguousarray(scores, np.float32)
        self._check(self._c.advance(self._pointer, scores.ctypes.data, len(scores)))
        self.num_frames += len(scores)

    @property
    def has_complete_path(self) -> bool:
        """Return whether a path so far ends in a final state."""
        return bool(self._c.has_complete_path(self._pointer))

    def best_path(self, ends_sentence: bool) -> UInt32[np.ndarray, " arcs"] | None:
        """Return the numbers of the graph's arcs on the best path so far; None if none is left.

        If it `ends_sentence`, the path ends in a final state, where one was reached.
        """
        length = self._c.best_path(self._pointer, ends_sentence, None, 0)
        if length < 0:
            return None
        arcs = np.empty(length, np.uint32)
        self._c.best_path(self._pointer, ends_sentence, arcs.ctypes.data, length)
        return arcs

    def end_lattice(self) -> np.ndarray:
        """End the search; return the arcs (SEARCH_ARC) of the paths within the lattice's beam.

        An arc is there if the best path through it is within the beam of the best of all. If no
        path ends in a final state, all may end; without any path there is no arc. Raises ValueError
        for a cycle of arcs that read no frame, without a lattice, and the second time.
        """
        if not self._keeps_lattice or self._has_ended:
            said = "ended before" if self._has_ended else "no lattice_beam, and so no lattice"
            raise ValueError(f"a search with {said}: begin another with a lattice_beam")
        self._has_ended = True
        arcs = np.empty(self._check(self._c.end_lattice(self._pointer)), SEARCH_ARC)
        self._c.read_lattice(self._pointer, arcs.ctypes.data)
        return arcs[np.lexsort((arcs["word"], arcs["label"], arcs["target"], arcs["source"]))]

    def _check(self, status: int) -> int:
        if status == _NO_MEMORY:
            raise MemoryError(f"no memory for a search after {self.num_frames} frames: lower beams")
        if status == _TOO_MANY_ARCS:
            raise TooManyArcsError(
                f"the best paths alone have more than {MAX_LATTICE_ARCS} arcs: lower max_active"
            )
        if status == _EPSILON_CYCLE:
            raise ValueError("graph: a cycle of arcs that read no frame: no lattice has it")
        return status
