"""Build the grammar acceptor G of an ARPA n-gram model, or of one word sequence.

kaldilm could read ARPA too, but after its import the import of kaldi-decoder or kaldifst hangs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import kaldifst

from training.decoding.graph.transducer import EPSILON, Arc, compile_transducer
from training.decoding.language_model.arpa import ArpaEntry, read_arpa
from training.decoding.language_model.ngrams import END, START, Ngram

BACKOFF_WORD = "#0"


@dataclass(frozen=True, slots=True)
class GrammarWeights:
    """GrammarWeights: a factor of the model's costs, and what each word costs besides.

    The cost of a word, its insertion penalty, is in natural logarithms.
    """

    scale: float = 1.0
    insertion_penalty: float = 0.0


AS_ESTIMATED = GrammarWeights()


@dataclass(frozen=True)
class _Entry:
    ngram: Ngram
    cost: float
    backoff_cost: float


def linear_grammar(words: Sequence[str], word_ids: Mapping[str, int]) -> kaldifst.StdVectorFst:
    """Build the acceptor of exactly one word sequence."""
    arcs = [Arc(i, i + 1, word_ids[w], word_ids[w], 0.0) for i, w in enumerate(words)]
    return compile_transducer(arcs, {len(words): 0.0})


def ngram_grammar(
    arpa: str, word_ids: Mapping[str, int], weights: GrammarWeights = AS_ESTIMATED
) -> kaldifst.StdVectorFst:
    """Build the acceptor of an ARPA model: one state for each history, back-off arcs labelled #0.

    Raises ValueError for malformed text and for words that `word_ids` lacks.
    """
    entries = [_weighted(entry, weights) for entry in read_arpa(arpa, word_ids)]
    states = _history_states(entries)
    arcs = [arc for entry in entries for arc in _arcs(entry, states, word_ids)]
    # As in Kaldi's arpa2fst, </s> is no arc: its cost ends the sentence.
    final_costs = {
        states[entry.ngram[:-1]]: entry.cost for entry in entries if entry.ngram[-1] == END
    }
    return compile_transducer(arcs, final_costs, states.get((START,), states[()]))


def _history_states(entries: Sequence[_Entry]) -> dict[Ngram, int]:
    """Number the empty history and every n-gram that longer ones may continue."""
    order = max((len(entry.ngram) for entry in entries), default=0)
    histories = [e.ngram for e in entries if len(e.ngram) < order and e.ngram[-1] != END]
    return {history: number for number, history in enumerate(dict.fromkeys([(), *histories]))}


def _arcs(entry: _Entry, states: Mapping[Ngram, int], word_ids: Mapping[str, int]) -> Iterator[Arc]:
    *_, word = entry.ngram
    # The word leads to the longest history that the model has.
    if word not in (START, END):
        target = states[_longest_history(entry.ngram, states)]
        label = word_ids[word]
        yield Arc(states[entry.ngram[:-1]], target, label, label, entry.cost)
    # A history backs off to the next shorter one.
    if entry.ngram in states:
        shorter = states[_longest_history(entry.ngram[1:], states)]
        backoff_label = word_ids[BACKOFF_WORD]
        yield Arc(states[entry.ngram], shorter, backoff_label, EPSILON, entry.backoff_cost)


def _longest_history(ngram: Ngram, states: Mapping[Ngram, int]) -> Ngram:
    return next(ngram[i:] for i in range(len(ngram) + 1) if ngram[i:] in states)


def _weighted(entry: ArpaEntry, weights: GrammarWeights) -> _Entry:
    # ARPA's log10 probabilities become OpenFst's costs in natural logarithms.
    scale = -weights.scale * math.log(10)
    penalty = 0.0 if entry.ngram[-1] == END else weights.insertion_penalty
    return _Entry(entry.ngram, entry.log_probability * scale + penalty, entry.log_backoff * scale)
