"""Grammars: n-gram models as acceptors of word sequences, over arrays.

A grammar has a state for each history that an n-gram of the model continues, and for the empty one.
The arcs of a state are its words, in order of their ids, and at last, labelled #0, the back-off to
a shorter history. A state's final cost is that of </s>. As in Kaldi's arpa2fst, a history that no
n-gram continues has no state: what leads to it leads on to the shorter one, at the back-off's cost.
"""

import math
from collections.abc import Mapping

import numpy as np

from training.decode.const_fst import ARC, ConstFst
from training.decode.ngrams import END, START, BackoffModel

BACKOFF_WORD = "#0"


def ngram_grammar(model: BackoffModel, word_ids: Mapping[str, int]) -> ConstFst:
    """Build the grammar of a model; ValueError for words that `word_ids` lacks."""
    if foreign := sorted({*model.words} - word_ids.keys() - {START, END}):
        raise ValueError(f"{foreign[0]!r} is not in lexicon.txt: add it")
    ids = {**word_ids, START: _START_LABEL, END: _END_LABEL}
    labels = np.array([ids[word] for word in model.words], np.int32)[model.ngrams["word"]]
    labels[0] = _START_LABEL  # the empty n-gram ends in no word either
    histories, suffixes = model.ngrams["history"].copy(), model.suffixes()
    histories[0] = 0
    has_state = np.zeros(len(histories), np.bool_)
    has_state[histories] = True
    # A longer model begins at the state of <s>, whatever follows.
    starts = np.flatnonzero(labels[: model.starts[min(model.order, 2)]] == _START_LABEL)
    has_state[starts] = True
    states = np.cumsum(has_state, dtype=np.int32) - np.int32(1)
    # Where an n-gram leads as a history: to its own state, or by way of its suffix.
    targets = np.where(has_state, states, -1)
    nats = -math.log(10)  # ARPA's log10 probabilities become costs
    backoff_costs = model.ngrams["log_backoff"] * nats
    backoff_costs[model.of_length(model.order)] = 0.0  # no history
    extra_costs = np.zeros(len(targets))
    for length in range(1, model.order + 1):
        rows = model.of_length(length)
        backoff_costs[rows] += extra_costs[suffixes[rows]]
        extra_costs[rows] = np.where(has_state[rows], 0.0, backoff_costs[rows])
        targets[rows] = np.where(has_state[rows], states[rows], targets[suffixes[rows]])
    costs = model.ngrams["log_probability"] * nats
    sources = states[histories]
    # As in Kaldi's arpa2fst, </s> is no arc: its cost ends the sentence.
    final_costs = np.full(np.count_nonzero(has_state), np.inf, np.float32)
    ends = np.flatnonzero(labels == _END_LABEL)
    final_costs[sources[ends]] = costs[ends]
    words = np.flatnonzero(labels >= 0)
    backoffs = np.flatnonzero(has_state)[1:]
    arcs = np.empty(len(words) + len(backoffs), ARC)
    arcs["input_label"][: len(words)] = labels[words]
    arcs["input_label"][len(words) :] = word_ids[BACKOFF_WORD]
    arcs["output_label"] = arcs["input_label"]
    arcs["cost"] = np.append(costs[words] + extra_costs[words], backoff_costs[backoffs])
    arcs["target"] = np.append(targets[words], targets[suffixes[backoffs]])
    arc_sources = np.append(sources[words], states[backoffs])
    return ConstFst.of(arc_sources, arcs, final_costs, int(states[starts[-1]]))


_START_LABEL, _END_LABEL = -1, -2
