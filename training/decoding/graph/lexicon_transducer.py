"""Build the lexicon transducer L from phones to words, with optional silence between words."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import kaldifst

from training.decoding.graph.transducer import EPSILON, Arc, compile_transducer

SILENCE_PROBABILITY = 0.5  # before the first word, and after every word
_START, _LOOP, _SILENCE = 0, 1, 2
Labels = tuple[int, ...]


@dataclass(frozen=True)
class Spelling:
    """Spelling is one pronunciation of a word: its output label and its input labels."""

    word_id: int
    labels: Labels


@dataclass(frozen=True)
class LexiconTransducer:
    """LexiconTransducer is L, with the input labels that only disambiguate its paths."""

    fst: kaldifst.StdVectorFst
    disambiguation_labels: range


def lexicon_transducer(
    spellings: Sequence[Spelling], silence: Labels, num_labels: int, backoff_word_id: int
) -> LexiconTransducer:
    """Build L of `spellings`, any number of words in a row; labels 1..num_labels are phones.

    Disambiguation labels follow the phones: one for the grammar's back-off, some for homophones and
    words that begin other words, one for the end of a silence. Without them L o G cannot be
    determinized.
    """
    # Mohri et al. call these symbols #1, #2, ...; Kaldi's add_lex_disambig.pl numbers them so.
    numbers = _disambiguation_numbers(spellings)
    backoff, after_silence = num_labels + 1, num_labels + 2 + max(numbers, default=0)
    states = count(_SILENCE + 1)
    no_silence_cost = -math.log(1 - SILENCE_PROBABILITY)
    silence_cost = -math.log(SILENCE_PROBABILITY)
    arcs = [
        Arc(_START, _LOOP, EPSILON, EPSILON, no_silence_cost),
        Arc(_START, _SILENCE, EPSILON, EPSILON, silence_cost),
        # #0 passes through L, so that the grammar's back-off survives composition.
        Arc(_LOOP, _LOOP, backoff, backoff_word_id, 0.0),
        *_chain((*silence, after_silence), EPSILON, {_LOOP: 0.0}, _SILENCE, states),
    ]
    ends = {_LOOP: no_silence_cost, _SILENCE: silence_cost}
    for spelling, number in zip(spellings, numbers, strict=True):
        labels = spelling.labels + ((backoff + number,) if number else ())
        arcs += _chain(labels, spelling.word_id, ends, _LOOP, states)
    fst = compile_transducer(arcs, {_LOOP: 0.0})
    return LexiconTransducer(fst, range(backoff, after_silence + 1))


def _chain(
    labels: Labels, word_id: int, ends: dict[int, float], source: int, states: "count[int]"
) -> Iterator[Arc]:
    """Yield arcs that read `labels` one after the other and write the word on the first."""
    output = word_id
    for label in labels[:-1]:
        target = next(states)
        yield Arc(source, target, label, output, 0.0)
        source, output = target, EPSILON
    for end, cost in ends.items():
        yield Arc(source, end, labels[-1], output, cost)


def _disambiguation_numbers(spellings: Sequence[Spelling]) -> list[int]:
    """Return 0 for a spelling that is unique and begins no other, else 1, 2, ... among equals."""
    frequency = Counter(spelling.labels for spelling in spellings)
    beginnings = {labels[:length] for labels in frequency for length in range(1, len(labels))}
    used: Counter[Labels] = Counter()
    numbers = []
    for spelling in spellings:
        labels = spelling.labels
        ambiguous = frequency[labels] > 1 or labels in beginnings
        used[labels] += ambiguous
        numbers.append(used[labels])
    return numbers
