"""Search decoding graphs for best paths: words, the senone of every frame, each word's frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from infra.settings import Range, check_ranges
from training.decode.graph import DecodingGraph
from training.decode.lexicon import SILENCE_ID, Lexicon
from training.decode.search import Search
from training.decode.senones import SenoneTree

ALIGNMENT_BEAM = 1e12
"""Keeps all paths of a known word sequence, whatever the scores are.

Unscaled log-densities of monophones put the only complete path of 260 frames more than 1,000 behind
the best unfinished one.
"""


class AlignmentError(ValueError):
    """AlignmentError reports an utterance with too few frames for its transcript's words."""


@dataclass(frozen=True)
class DecoderConfig:
    """DecoderConfig bounds the search: beams, in units of scaled log-likelihood, and states.

    A lattice has the paths within `lattice_beam` of the best.
    """

    beam: Annotated[float, Range(1e-6, ALIGNMENT_BEAM)] = 13.0
    max_active: Annotated[int, Range(2, 2**31 - 1)] = 7000
    lattice_beam: Annotated[float, Range(1e-6, ALIGNMENT_BEAM, zero="no lattice")] = 0.0

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True, eq=False)
class BestPath:
    """BestPath: the words of a search, and the senone of every frame on their path."""

    words: tuple[str, ...]
    senones: Int64[np.ndarray, " frames"]


@dataclass(frozen=True, slots=True, eq=False)
class FoundLattice:
    """FoundLattice: the arcs (SEARCH_ARC) of a search's lattice, one at least.

    A search that reached no final state has unfinished paths, which end no sentence.
    """

    arcs: np.ndarray
    ends_sentence: bool


class StreamingSearch(Search):
    """StreamingSearch finds best paths while log-likelihoods arrive, divided by priors and scaled.

    Each frame is searched once; pieces of any lengths give the paths of the whole. An utterance
    has a search of its own.
    """

    def __init__(self, graph: DecodingGraph, config: DecoderConfig) -> None:
        bounds = config.beam, config.max_active, config.lattice_beam or None
        super().__init__(graph.searchable, *bounds)
        self._words = graph.words

    def best(self, ends_sentence: bool) -> BestPath | None:
        """Return the best path so far; if it `ends_sentence`, one that does so, where there is."""
        path = self.best_path(ends_sentence) if self.num_frames else None
        if path is None:
            return None
        arcs = self._graph.fst.arcs[path]
        labels, word_ids = arcs["input_label"], arcs["output_label"]
        words = tuple(self._words[word_id] for word_id in word_ids[word_ids > 0])
        # Label 0 is epsilon, so senone s has the input label s + 1.
        return BestPath(words, labels[labels > 0].astype(np.int64) - 1)

    def lattice(self) -> FoundLattice | None:
        """End the search; return the lattice that it kept, None if no path is left."""
        if not self.num_frames:
            return None
        ends_sentence = self.has_complete_path
        arcs = self.end_lattice()
        return FoundLattice(arcs, ends_sentence) if len(arcs) else None


def find_lattice(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    config: DecoderConfig,
) -> FoundLattice | None:
    """Return the lattice of log-likelihoods divided by priors and scaled; None without a path."""
    search = StreamingSearch(graph, config)
    search.advance(log_likelihoods)
    return search.lattice()


def decode(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    config: DecoderConfig,
) -> list[str]:
    """Return the best path's words for log-likelihoods divided by priors and scaled.

    If no path ends a sentence on the last frame, the best unfinished one is taken. Without any path
    there are no words.
    """
    search = StreamingSearch(graph, config)
    search.advance(log_likelihoods)
    path = search.best(ends_sentence=True)
    return list(path.words) if path else []


def align(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    beam: float = ALIGNMENT_BEAM,
) -> Int64[np.ndarray, " frames"]:
    """Return the senone of every frame on the best complete path.

    A narrower `beam` may miss that path for another complete one; where it finds none, all paths
    are searched. Raises AlignmentError if the frames are too few for the graph's shortest word
    sequence.
    """
    for width in dict.fromkeys((beam, ALIGNMENT_BEAM)):
        search = StreamingSearch(graph, DecoderConfig(width, 2**31 - 1))
        search.advance(log_likelihoods)
        if search.has_complete_path:
            path = search.best(ends_sentence=True)
            assert path is not None, "a complete path is one"
            return path.senones
    raise AlignmentError(f"{len(log_likelihoods)} frames: too few for the words to align")


class Span(NamedTuple):
    """Span is a word's first frame, and the frame after its last one."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """_Node: a phone of the word of this number, -1 if between words; None follows at the end."""

    phone: int
    word: int
    following: "Sequence[_Node | None]"


class _State(NamedTuple):
    """_State is a phone of the transcript, the phone before it and the node after it."""

    node: _Node
    previous_phone: int
    following: _Node | None


def word_spans(
    senones: Int64[np.ndarray, " frames"], words: Sequence[str], lexicon: Lexicon, tree: SenoneTree
) -> list[Span]:
    """Return the frames of each word on a path of these senones.

    A graph writes a word early or late, as determinization and phonetic context move its label; the
    path's senones are those of the words' phones, in order. Where a search ended within a word,
    that word and those written after it share the frames from its first one on evenly; all words
    do where no beginning of a transcript explains the frames.
    """
    path = _phone_path(senones, words, lexicon, tree, whole=False) or []
    spans: dict[int, Span] = {}
    for frame in reversed(range(len(path))):
        word = path[frame].word
        spans[word] = Span(frame, spans[word].end if word in spans else frame + 1)
    last = max(spans, default=-1)
    if last + 1 < len(words):
        begin, shared = (spans[last].start, last) if last >= 0 else (0, 0)
        num_frames, num_words = len(senones) - begin, len(words) - shared
        bounds = [begin + num_frames * number // num_words for number in range(num_words + 1)]
        spans |= {shared + n: Span(*ends) for n, ends in enumerate(pairwise(bounds))}
    return [spans[word] for word in range(len(words))]


def phone_segments(
    senones: Int64[np.ndarray, " frames"], words: Sequence[str], lexicon: Lexicon, tree: SenoneTree
) -> tuple[Int32[np.ndarray, " segments"], Int32[np.ndarray, " segments"]]:
    """Return the phones on an aligned path of these senones, and the first frame of each.

    `words` are the lexicon's `transcript` that was aligned.
    """
    path = _phone_path(senones, words, lexicon, tree)
    assert path is not None, "an aligned path is a transcript's"
    # Of two equal phones in a row, each is a node of its own.
    starts = [n for n, node in enumerate(path) if n == 0 or node is not path[n - 1]]
    phones = np.array([path[start].phone for start in starts], np.int32)
    return phones, np.array(starts, np.int32)


def _phone_path(
    senones: Int64[np.ndarray, " frames"],
    words: Sequence[str],
    lexicon: Lexicon,
    tree: SenoneTree,
    *,
    whole: bool = True,
) -> list[_Node] | None:
    """Return each frame's phone of the transcript; None if none has the senones.

    If it need not be `whole`, the path that comes furthest in the words will do, and frames after
    these words have no phone.
    """
    firsts = _first_nodes(words, lexicon)
    active = [_State(node, SILENCE_ID, after) for node in firsts for after in node.following]
    trace: list[dict[_State, _State]] = []
    for number, senone in enumerate(senones.tolist()):
        reached: dict[_State, _State] = {}
        for state in active:
            node, _, following = state
            possible = [state]
            if number and following is not None:
                possible += [_State(following, node.phone, each) for each in following.following]
            for new in possible:
                right = SILENCE_ID if new.following is None else new.following.phone
                if tree.table[new.previous_phone, new.node.phone, right] == senone:
                    reached.setdefault(new, state)
        if not (whole or reached):
            break  # the frames of a word that is not written yet
        trace.append(reached)
        active = list(reached)
    ended = next((state for state in active if state.following is None), None)
    if not whole and ended is None:
        ended = max(active, key=lambda state: state.node.word, default=None)
    if not trace or ended is None:
        return None
    path: list[_Node] = []
    for reached in reversed(trace):
        path.append(ended.node)
        ended = reached[ended]
    return path[::-1]


def _first_nodes(words: Sequence[str], lexicon: Lexicon) -> list[_Node]:
    """Link the phones of the words, with optional silences; return those that may be first."""
    following: list[_Node | None] = [None]
    firsts: list[_Node] = []
    # From the last word back, so that what follows a phone is known.
    for number in reversed(range(len(words))):
        after_word = [*following, _Node(SILENCE_ID, -1, following)]
        firsts = []
        for pronunciation in lexicon.spoken(words[number]):
            after: Sequence[_Node | None] = after_word
            for phone in reversed(pronunciation):
                node = _Node(lexicon.phone_ids[phone], number, after)
                after = [node]
            firsts.append(node)
        following = [*firsts]
    return [*firsts, _Node(SILENCE_ID, -1, following)] if words else []
