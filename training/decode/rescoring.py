"""Rescore lattices by a larger grammar; find best paths, and how probable their words are.

A first pass searches the graph HCLG of a small grammar. Here its language model's costs are
subtracted from the lattice, and a large grammar's added: 003 II-A2 composes with the large one
while it searches; this does so with the words that the search kept. Only sums of costs along whole
paths have a meaning: determinization has moved costs, and labels of words, along HCLG's paths.

A grammar backs off from a history only where it lists no such word, as ARPA has it. A path of HCLG
may back off wherever that is cheaper; its difference from the grammar's own cost stays in the
path's. Bigrams that are interpolated have none.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from pipeline.compiled_library import compiled_library
from training.decode.const_fst import ARC, STATE, ConstFst
from training.decode.decoder import BestPath, FoundLattice
from training.decode.search import MAX_LATTICE_ARCS, SEARCH_ARC

POSTERIOR_SCALE = 0.5
"""The factor of costs in the confidence of words, which lattices overstate without (0121)."""

LEAST_CONFIDENCE = 1e-4

_BEAM_STEP = 0.75
_LEAST_BEAM = 1e-6

_NO_MEMORY, _TOO_MANY_ARCS, _NO_PATH, _UNKNOWN_WORD, _BROKEN_GRAMMAR = -1, -2, -3, -4, -5


def check_lattice(lattice: np.ndarray) -> None:
    """Assert what SEARCH_ARC says of a lattice's states and arcs."""
    assert lattice.dtype == SEARCH_ARC, lattice.dtype
    assert lattice.flags.c_contiguous, "arcs in a row"
    assert len(lattice), "a lattice has a path"
    sources, targets = lattice["source"], lattice["target"]
    assert sources[0] == 0, "the start is state 0"
    assert (np.diff(sources) >= 0).all(), "arcs are sorted by source"
    assert (sources < targets).all(), "arcs lead to larger states"
    assert lattice["word"].min() >= 0, "words have ids"


def _arcs_of(lattice: np.ndarray) -> tuple[int, int, int]:
    """Return what the library takes of a lattice: its address, its numbers of arcs and states."""
    check_lattice(lattice)
    return lattice.ctypes.data, len(lattice), int(lattice["target"].max()) + 1


def best_arcs(lattice: np.ndarray) -> Int64[np.ndarray, " arcs"]:
    """Return the numbers of the arcs on the best path, in order; of equal paths, the first."""
    *arcs, num_states = _arcs_of(lattice)
    path = np.empty(num_states, np.int64)
    found = _library().best_arcs(*arcs, num_states, path.ctypes.data)
    return path[: _counted(found)][::-1].copy()


def words_and_senones(path: np.ndarray, words: Sequence[str]) -> BestPath:
    """Return the words on a path's arcs, of a table of words, and the senone of every frame."""
    labels = path["label"][path["label"] > 0]
    said = tuple(words[word] for word in path["word"].tolist() if word)
    return BestPath(said, labels.astype(np.int64) - 1)


def arc_posteriors(lattice: np.ndarray, scale: float) -> Float64[np.ndarray, " arcs"]:
    """Return each arc's probability: that of the paths through it, by exp(-`scale` cost)."""
    posteriors = np.empty(len(lattice))
    _counted(_library().arc_posteriors(*_arcs_of(lattice), scale, posteriors.ctypes.data))
    return posteriors


def word_confidences(
    lattice: np.ndarray, path: Int64[np.ndarray, " arcs"], scale: float = POSTERIOR_SCALE
) -> Float64[np.ndarray, " words"]:
    """Return the confidence of each word on a path, whose arcs have these numbers.

    On a path a word lasts from the frame at which it is written to that of the next word, or to the
    end: so labels that are early or late are so on all paths alike. Of several that are written
    before one frame each lasts there, and those behind all frames last at the last. The posterior
    of a word at a frame is the probability of the paths on which it lasts there (Wessel, Schlueter,
    Macherey and Ney, "Confidence measures for large vocabulary continuous speech recognition",
    2001). Confidence is its mean over the frames of the word on the path, or over the frame at
    which it is written, if the next one is there, too.

    It is between 0.0001 and 0.9999, as normalized cross-entropy is infinite where a word is wrong
    at 1 or right at 0, and has four digits, as the last bits differ between CPUs.
    """
    posteriors = arc_posteriors(lattice, scale)
    address, *sizes = _arcs_of(lattice)
    arcs = lattice[path]
    num_read = np.cumsum(arcs["label"] > 0)
    num_frames = int(num_read[-1])
    assert num_frames, "speech has frames"
    writes = np.flatnonzero(arcs["word"])
    starts = np.minimum((num_read - (arcs["label"] > 0))[writes], num_frames - 1)
    ends = np.maximum(np.append(starts[1:], num_frames), starts + 1)
    lasting: dict[int, Float64[np.ndarray, " frames"]] = {}
    for word in set(arcs["word"][writes].tolist()):
        lasting[word] = np.zeros(num_frames)
        arguments = address, posteriors.ctypes.data, *sizes, word
        _counted(_library().word_posteriors(*arguments, lasting[word].ctypes.data))
    found = [
        lasting[word][start:end].mean()
        for word, start, end in zip(
            arcs["word"][writes].tolist(), starts.tolist(), ends.tolist(), strict=True
        )
    ]
    confidences: Float64[np.ndarray, " words"] = np.array(found, np.float64)
    return confidences.clip(LEAST_CONFIDENCE, 1 - LEAST_CONFIDENCE).round(4)


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """Hypothesis: the best path of a rescored lattice, and the confidence of each of its words."""

    path: BestPath
    confidences: Float64[np.ndarray, " words"]


@dataclass(frozen=True, slots=True, eq=False)
class SecondPass:
    """SecondPass gives the words of lattices the costs of `grammar`, not those of `first_pass`.

    A grammar has a state for each history, whose arcs are sorted by word; the arc of the last of
    `words`, whose ids are theirs, leads to the shorter history. It begins in the history of <s>; a
    final cost is that of </s>. The new costs are multiplied by `scale`, and the penalty, in natural
    logarithms, is added at each word.
    """

    first_pass: ConstFst
    grammar: ConstFst
    words: tuple[str, ...]
    scale: float
    insertion_penalty: float
    beam: float

    def rescored(self, found: FoundLattice, max_arcs: int = MAX_LATTICE_ARCS) -> np.ndarray:
        """Return the lattice (SEARCH_ARC) by the other grammar.

        Its states are those of the lattice, each once for each pair of histories. Paths beyond the
        beam are left out: frame by frame by their cost so far, with the lattice's own cost of the
        rest, and at last by their whole cost. A beam that leaves more than `max_arcs` arcs is
        narrowed. ValueError where the first grammar lacks a word of the lattice, and where the
        other has none of its sentences.
        """
        library, given = _library(), _arcs_of(found.arcs)
        backoff_word = len(self.words) - 1
        grammars = [_Grammar.of(each, backoff_word) for each in (self.first_pass, self.grammar)]
        arcs = np.empty(max_arcs, SEARCH_ARC)
        count, beam = _TOO_MANY_ARCS, self.beam
        while beam >= _LEAST_BEAM:
            count = library.rescore(
                *given,
                *(ctypes.byref(grammar) for grammar in grammars),
                *(self.scale, self.insertion_penalty, beam, found.ends_sentence),
                *(arcs.ctypes.data, max_arcs),
            )
            if count != _TOO_MANY_ARCS:
                break
            beam *= _BEAM_STEP
        return arcs[: _counted(count)].copy()

    def best(self, found: FoundLattice) -> BestPath:
        """Return the best path of the rescored lattice."""
        lattice = self.rescored(found)
        return words_and_senones(lattice[best_arcs(lattice)], self.words)

    def hypothesis(self, found: FoundLattice) -> Hypothesis:
        """Return the best path, and how probable its words are among all of the lattice."""
        lattice = self.rescored(found)
        arcs = best_arcs(lattice)
        path = words_and_senones(lattice[arcs], self.words)
        return Hypothesis(path, word_confidences(lattice, arcs))


_pointer, _number, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_lattice = _pointer, _number, _number
_options = _double, _double, _double, ctypes.c_int32
_C = compiled_library(
    "training.decode._rescoring",
    {
        "rescore": (_number, *_lattice, _pointer, _pointer, *_options, _pointer, _number),
        "best_arcs": (_number, *_lattice, _pointer),
        "arc_posteriors": (_number, *_lattice, _double, _pointer),
        "word_posteriors": (_number, _pointer, *_lattice, ctypes.c_int32, _pointer),
    },
)


class _Grammar(ctypes.Structure):
    _fields_ = (
        ("histories", _pointer),
        ("arcs", _pointer),
        ("num_histories", _number),
        ("num_arcs", _number),
        ("start", ctypes.c_int32),
        ("backoff_word", ctypes.c_int32),
    )

    @classmethod
    def of(cls, grammar: ConstFst, backoff_word: int) -> "_Grammar":
        """Point to a grammar's arrays, which may be mapped."""
        histories, arcs = grammar.states, grammar.arcs
        assert (histories.dtype, arcs.dtype) == (STATE, ARC), "a grammar's arrays"
        assert histories.flags.c_contiguous, "states in a row"
        assert arcs.flags.c_contiguous, "arcs in a row"
        pointers = histories.ctypes.data, arcs.ctypes.data
        return cls(*pointers, len(histories), len(arcs), grammar.start, backoff_word)


def _counted(found: int) -> int:
    """Return what a function of the library counted, or raise its error."""
    if found >= 0:
        return found
    if found == _NO_MEMORY:
        raise MemoryError("no memory for a lattice: lower lattice_beam")
    errors = {
        _TOO_MANY_ARCS: "its best path alone has too many arcs: allow more arcs",
        _NO_PATH: "the large language model has none of its sentences: need its words and </s>",
        _UNKNOWN_WORD: "the first pass's language model lacks a word of it: build both again",
        _BROKEN_GRAMMAR: "a grammar's states or arcs do not exist: build it again",
    }
    raise ValueError(f"a lattice cannot be rescored: {errors[found]}")


def _library() -> ctypes.CDLL:
    if _C is None:
        raise ValueError(
            "lattices need the C library training.decode._rescoring, which was not compiled: "
            "install a C compiler, and then the package again"
        )
    return _C
