"""Build decoding graphs H o C o L o G from senones (input label senone + 1) to words.

G accepts word sequences: those of an n-gram model, or one. L reads phones and writes words, with
optional silence between them. A state may emit its senone for any number of frames. Graphs are
arrays; kaldifst composes, determinizes and minimizes them.

kaldilm could read ARPA too, but after its import the import of kaldifst hangs.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import kaldifst
import numpy as np

from training.decode.const_fst import ARC, ConstFst
from training.decode.grammar import BACKOFF_WORD
from training.decode.lexicon import SILENCE_ID, Lexicon
from training.decode.search import SearchableGraph
from training.decode.senones import NO_WORDS, SenoneTree

EPSILON = 0

MAX_GRAMMAR_ARCS = 6_000_000
"""The most arcs of a grammar whose graph is built: it takes 1.05 kB of each, 6.3 GB."""

SILENCE_PROBABILITY = 0.5  # before the first word, and after every word
_START, _LOOP, _SILENCE = 0, 1, 2
Labels = tuple[int, ...]


def _lexicon_transducer(
    lexicon: Lexicon, spoken: Lexicon, labels_of: Callable[[int], Labels], num_labels: int
) -> tuple[ConstFst, range]:
    """Build L of the `spoken` words, any number in a row; return the labels that disambiguate, too.

    Phone ids are those of the whole `lexicon`; labels 1..num_labels are phones. Disambiguation
    labels follow them: one for the grammar's back-off, some for homophones and words that begin
    other words, one for the end of a silence. Without them L o G cannot be determinized.
    """
    phone_labels = {phone: labels_of(number) for phone, number in lexicon.phone_ids.items()}
    words, word_ids, spellings = word_table(spoken), list[int](), list[Labels]()
    for word_id, word in enumerate(words):
        for spelled in spoken.pronunciations.get(word, ()):
            word_ids.append(word_id)
            spellings.append(tuple(chain.from_iterable(map(phone_labels.__getitem__, spelled))))
    # Mohri et al. call these symbols #1, #2, ...; Kaldi's add_lex_disambig.pl numbers them so.
    numbers = _disambiguation_numbers(spellings)
    backoff, after_silence = num_labels + 1, num_labels + 2 + max(numbers, default=0)
    labels = [
        (*spelled, backoff + number) if number else spelled
        for spelled, number in zip(spellings, numbers, strict=True)
    ]
    no_silence_cost = -math.log(1 - SILENCE_PROBABILITY)
    silence_cost = -math.log(SILENCE_PROBABILITY)
    silence = (*labels_of(SILENCE_ID), after_silence)
    # A spelling of n labels has n - 1 states of its own; those of the silence follow _SILENCE.
    first_of_words = _SILENCE + len(silence)
    sources = np.array([_START, _START, _LOOP], np.int32)
    arcs = np.array(
        [
            (EPSILON, EPSILON, no_silence_cost, _LOOP),
            (EPSILON, EPSILON, silence_cost, _SILENCE),
            # #0 passes through L, so that the grammar's back-off survives composition.
            (backoff, words.index(BACKOFF_WORD), 0.0, _LOOP),
        ],
        ARC,
    )
    ends = {_LOOP: no_silence_cost, _SILENCE: silence_cost}
    parts = [
        (sources, arcs),
        _chains([silence], [EPSILON], {_LOOP: 0.0}, _SILENCE, _SILENCE + 1),
        _chains(labels, word_ids, ends, _LOOP, first_of_words),
    ]
    num_states = first_of_words + sum(map(len, labels)) - len(labels)
    final_costs = np.full(num_states, np.inf, np.float32)
    final_costs[_LOOP] = 0.0
    sources, arcs = map(np.concatenate, zip(*parts, strict=True))
    return ConstFst.of(sources, arcs, final_costs, _START), range(backoff, after_silence + 1)


def _chains(
    spellings: Sequence[Labels],
    word_ids: Sequence[int],
    ends: dict[int, float],
    source: int,
    first_state: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return sources and arcs that read the labels of each spelling and write its word first.

    All begin at `source`, and have ways to each of the `ends`; states between them are numbered
    from `first_state` on.
    """
    lengths = np.fromiter(map(len, spellings), np.int64, len(spellings))
    num_arcs = int(lengths.sum())
    lasts = np.cumsum(lengths) - 1
    firsts = lasts - lengths + 1
    arcs = np.zeros(num_arcs, ARC)
    arcs["input_label"] = np.fromiter(chain.from_iterable(spellings), np.int32, num_arcs)
    arcs["output_label"][firsts] = word_ids
    # The arc after label k of spelling i, counted over all labels, leads to state k - i.
    arcs["target"] = np.arange(num_arcs) - np.repeat(np.arange(len(lengths)), lengths) + first_state
    sources = arcs["target"] - 1
    sources[firsts] = source
    is_last = np.zeros(num_arcs, np.bool_)
    is_last[lasts] = True
    inner, leaving = arcs[~is_last], np.repeat(arcs[is_last], len(ends))
    leaving["target"] = np.tile(np.array(list(ends), np.int32), len(lengths))
    leaving["cost"] = np.tile(np.array(list(ends.values()), np.float32), len(lengths))
    return (
        np.concatenate([sources[~is_last], np.repeat(sources[is_last], len(ends))]),
        np.concatenate([inner, leaving]),
    )


def _disambiguation_numbers(spellings: Sequence[Labels]) -> list[int]:
    """Return 0 for a spelling that is unique and begins no other, else 1, 2, ... among equals."""
    frequency = Counter(spellings)
    # In order, what begins others is followed by one of them.
    ordered = sorted(frequency)
    beginnings = {one for one, other in pairwise(ordered) if other[: len(one)] == one}
    used: Counter[Labels] = Counter()
    numbers = []
    for labels in spellings:
        used[labels] += frequency[labels] > 1 or labels in beginnings
        numbers.append(used[labels])
    return numbers


# A phone lasts 80 ms or so: 2.5 low-rate frames, or 2.7 frames of 10 ms in each of 3 states.
LOOP_PROBABILITY = 0.6


def add_self_loops(fst: ConstFst) -> ConstFst:
    """Let every input label repeat, at the cost -log(LOOP_PROBABILITY).

    A state is split until all arcs into each part have the same label, which its loop repeats. All
    states of `fst` are on a path.
    """
    if not len(fst.states):
        return fst
    # A part of a state is numbered by its rank among pairs of a state and a label of an arc into
    # it; the start has a part that no arc leads into.
    num_labels = int(fst.arcs["input_label"].max(initial=EPSILON)) + 1
    pairs = fst.arcs["target"].astype(np.int64) * num_labels + fst.arcs["input_label"]
    parts, targets = np.unique(
        np.append(pairs, np.int64(fst.start) * num_labels + EPSILON), return_inverse=True
    )
    del pairs
    parts_of = (parts // num_labels).astype(np.int32)
    labels = (parts % num_labels).astype(np.int32)
    leave_costs = np.where(labels != EPSILON, -math.log(1 - LOOP_PROBABILITY), 0.0)
    leave_costs = leave_costs.astype(np.float32)
    # Each part has the arcs of its state.
    num_arcs = fst.states["num_arcs"][parts_of].astype(np.int64)
    looped = np.flatnonzero(labels != EPSILON).astype(np.int32)
    sources = np.concatenate([np.repeat(np.arange(len(parts), dtype=np.int32), num_arcs), looped])
    num_copied = len(sources) - len(looped)
    firsts = fst.states["first_arc"][parts_of] - (np.cumsum(num_arcs) - num_arcs)
    copied = np.repeat(firsts, num_arcs) + np.arange(num_copied)
    arcs = np.empty(len(sources), ARC)
    arcs[:num_copied] = fst.arcs[copied]
    arcs["target"][:num_copied] = targets[copied]
    arcs["cost"][:num_copied] += np.repeat(leave_costs, num_arcs)
    arcs["input_label"][num_copied:] = labels[looped]
    arcs["output_label"][num_copied:] = EPSILON
    arcs["cost"][num_copied:] = -math.log(LOOP_PROBABILITY)
    arcs["target"][num_copied:] = looped
    final_costs = fst.states["final_cost"][parts_of] + leave_costs
    return ConstFst.of(sources, arcs, final_costs, int(targets[-1]))


@dataclass(frozen=True)
class DecodingGraph:
    """DecodingGraph reads column l - 1 of the scores as input label l, and writes words[w] as w."""

    fst: ConstFst
    words: tuple[str, ...]
    num_senones: int

    @cached_property
    def searchable(self) -> SearchableGraph:
        """Return the graph as searches read it; ValueError if it is not whole."""
        return SearchableGraph(self.fst, self.num_senones, len(self.words))


def require_room(grammar: ConstFst, remedy: str) -> None:
    """Raise ValueError for a grammar of which memory would not hold the graph."""
    if len(grammar.arcs) > MAX_GRAMMAR_ARCS:
        raise ValueError(
            f"an n-gram model of {len(grammar.arcs):,} arcs: need at most {MAX_GRAMMAR_ARCS:,}, "
            f"whose graph is built in 8 GB: {remedy}"
        )


def grammar_graph(lexicon: Lexicon, tree: SenoneTree, grammar: ConstFst) -> DecodingGraph:
    """Build HCLG of a grammar over the lexicon's words."""
    return senone_graph(lexicon, lexicon, grammar, tree)


def alignment_graph(lexicon: Lexicon, tree: SenoneTree, words: Sequence[str]) -> DecodingGraph:
    """Build HCLG for one known word sequence; raise ValueError for words the lexicon lacks."""
    return senone_graph(lexicon, *_transcript(lexicon, words), tree)


def monophone_graph(lexicon: Lexicon, words: Sequence[str], num_states: int) -> DecodingGraph:
    """Build the graph of one word sequence without phonetic context.

    A phone has `num_states` states in a row; state k of phone p is column `p * num_states + k`.
    """

    def states(phone: int) -> Labels:
        return tuple(phone * num_states + state + 1 for state in range(num_states))

    spoken, grammar = _transcript(lexicon, words)
    table = word_table(spoken)
    num_labels = len(lexicon.phones) * num_states
    transducer, disambiguation = _lexicon_transducer(lexicon, spoken, states, num_labels)
    states_to_words = _determinized(_composed(transducer, grammar, len(table) - 1))
    plain = relabelled(states_to_words, _without(disambiguation))
    return DecodingGraph(add_self_loops(plain), table, num_labels)


def _transcript(lexicon: Lexicon, words: Sequence[str]) -> tuple[Lexicon, ConstFst]:
    """Return the lexicon of a transcript's words, and the transcript as a grammar."""
    if not words:
        raise ValueError(NO_WORDS)
    words = lexicon.transcript(words)
    spoken = lexicon.restricted_to(words)
    ids = word_ids(spoken)
    arcs = np.zeros(len(words), ARC)
    arcs["input_label"] = arcs["output_label"] = [ids[word] for word in words]
    arcs["target"] = np.arange(1, len(words) + 1)
    final_costs = np.full(len(words) + 1, np.inf, np.float32)
    final_costs[-1] = 0.0
    return spoken, ConstFst.of(np.arange(len(words)), arcs, final_costs, 0)


def word_table(lexicon: Lexicon) -> tuple[str, ...]:
    """Return a lexicon's words by id: an empty one first, and the back-off's at last."""
    return ("<eps>", *sorted(lexicon.pronunciations), BACKOFF_WORD)


def word_ids(lexicon: Lexicon) -> dict[str, int]:
    """Return the id of each word of the table."""
    return {word: number for number, word in enumerate(word_table(lexicon))}


def senone_graph(
    lexicon: Lexicon, spoken: Lexicon, grammar: ConstFst, tree: SenoneTree
) -> DecodingGraph:
    """Build HCLG: the `spoken` words of a lexicon in the order of a grammar, by the tree's senones.

    Labels of the grammar are the ids of these words.
    """
    if tree.phones != lexicon.phones:
        raise ValueError("the tree was grown for other phones: grow it again for this lexicon")
    transducer, disambiguation = _lexicon_transducer(
        lexicon, spoken, lambda phone: (phone + 1,), len(lexicon.phones)
    )
    words = word_table(spoken)
    # L o G: phones to words.
    phones_to_words = _determinized(_composed(transducer, grammar, len(words) - 1))
    # C: windows of three phones; each window's senone becomes the input label.
    contexts, windows = kaldifst.compose_context(
        disambig_syms=list(disambiguation),
        context_width=3,
        central_position=1,
        ifst=phones_to_words,
    )
    del phones_to_words
    labels = [_senone_label(window, tree) for window in windows]
    senones_to_words = _determinized(relabelled(contexts, labels).to_kaldifst())
    del contexts
    # H: one state for each senone, with a self-loop, once the disambiguation labels are removed.
    plain = relabelled(senones_to_words, _without(range(tree.num_senones + 1, max(labels) + 1)))
    del senones_to_words
    return DecodingGraph(add_self_loops(plain), words, tree.num_senones)


def _senone_label(window: list[int], tree: SenoneTree) -> int:
    """Return the input label of a context window: three phone labels, or a negative symbol.

    A phone label is 0 beyond the utterance's edges; a negative symbol disambiguates, and has a
    label above all senones'.
    """
    if len(window) == 1 and window[0] < 0:
        return tree.num_senones - window[0]
    if len(window) != 3:
        return EPSILON
    left, centre, right = (label - 1 if label else SILENCE_ID for label in window)
    return tree.senone(left, centre, right) + 1


def _determinized(fst: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    # Kaldi's recipe of Mohri et al.: determinize and remove epsilons, then minimize.
    kaldifst.determinize_star(fst, use_log=True)
    kaldifst.minimize_encoded(fst)
    return fst


def _composed(transducer: ConstFst, grammar: ConstFst, backoff_id: int) -> kaldifst.StdVectorFst:
    """Compose L and G, whose back-off writes nothing."""
    arcs = grammar.arcs.copy()
    arcs["output_label"][arcs["output_label"] == backoff_id] = EPSILON
    right = ConstFst.of(grammar.sources, arcs, grammar.states["final_cost"], grammar.start)
    left = transducer.to_kaldifst()
    kaldifst.arcsort(left, sort_type="olabel")
    return kaldifst.compose(left, right.to_kaldifst())


def relabelled(fst: kaldifst.StdVectorFst, labels: Sequence[int]) -> ConstFst:
    """Replace every input label by `labels[input_label]`."""
    copied = ConstFst.of_kaldifst(fst)
    arcs = copied.arcs.copy()
    arcs["input_label"] = np.asarray(labels, np.int32)[arcs["input_label"]]
    return ConstFst.of(copied.sources, arcs, copied.states["final_cost"], copied.start)


def _without(labels: range) -> Sequence[int]:
    """Return a table that replaces these labels, the last ones, by epsilon."""
    return [*range(labels.start), *(EPSILON for _ in labels)]
