"""Modified Kneser-Ney against a slow recursion of the published formula, and against one by hand.

Chen & Goodman 1999, equations 20 to 26; counts of n-grams that begin with <s> as in KenLM.
"""

import itertools
import math
import random
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.decode.arpa import UNKNOWN, count_ngrams, read_arpa
from training.decode.smoothing import (
    NO_COUNTS,
    Discounts,
    discounts_of,
    kneser_ney,
    kneser_ney_arpa,
)

VOCABULARY = ["a", "b", "c", "d"]
Sentences = list[list[str]]
Words = tuple[str, ...]

corpora = st.lists(
    st.lists(st.sampled_from([*VOCABULARY[:3], UNKNOWN]), max_size=7), min_size=1, max_size=12
)


class Reference:
    """Reference computes each probability from the sentences, without any stored table."""

    def __init__(self, sentences: Sentences, order: int) -> None:
        self.padded = [("<s>", *sentence, "</s>") for sentence in sentences]
        self.order = order
        self.predicted = [*VOCABULARY, "</s>"]
        self.discounts = cache(self.discounts_of)

    def occurrences(self, words: Words) -> int:
        return sum(
            sentence[i : i + len(words)] == words
            for sentence in self.padded
            for i in range(len(sentence))
        )

    def count(self, words: Words) -> int:
        """Return c, or N1+(. words): in how many different words' wake the n-gram occurs."""
        if len(words) == self.order or words[0] == "<s>":
            return self.occurrences(words)
        everything = ["<s>", UNKNOWN, *VOCABULARY]
        return sum(self.occurrences((left, *words)) > 0 for left in everything)

    def discounts_of(self, length: int) -> list[float]:
        histories = itertools.product(["<s>", *VOCABULARY], repeat=length - 1)
        counts = Counter(
            self.count((*history, word))
            for history in histories
            if "<s>" not in history[1:]
            for word in self.predicted
        )
        n1, n2, n3, n4 = (counts[times] for times in (1, 2, 3, 4))
        if n1 == 0 or n2 == 0:
            return [0, 0.5, 1.0, 1.5]
        y = n1 / (n1 + 2 * n2)
        if n3 > 0 and n4 > 0:
            published = [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
            if published[2] > 0 and published[3] > 0:
                return published
        return [0, y, y, y]

    def probability(self, history: Words, word: str) -> float:
        counts = [self.count((*history, each)) for each in self.predicted]
        lower = self.probability(history[1:], word) if history else 1 / len(self.predicted)
        if sum(counts) == 0:
            return lower
        discount = self.discounts(len(history) + 1)
        own = self.count((*history, word))
        gamma = sum(discount[min(each, 3)] for each in counts) / sum(counts)
        return max(own - discount[min(own, 3)], 0) / sum(counts) + gamma * lower


class Arpa:
    """Arpa answers from the text alone: it backs off until the n-gram is listed."""

    def __init__(self, text: str) -> None:
        self.entries = {entry.ngram: entry for entry in read_arpa(text)}

    def probability(self, history: Words, word: str) -> float:
        if (entry := self.entries.get((*history, word))) is not None:
            return 10**entry.log_probability
        weight = 10 ** self.entries[history].log_backoff if history in self.entries else 1.0
        return weight * self.probability(history[1:], word)


def histories_below(order: int) -> list[Words]:
    return [
        words
        for length in range(order)
        for words in itertools.product(["<s>", *VOCABULARY], repeat=length)
        if "<s>" not in words[1:]
    ]


@settings(max_examples=40, deadline=None)
@given(corpora, st.integers(1, 5))
def test_probabilities_sum_to_one_after_every_history(sentences: Sentences, order: int) -> None:
    """Probabilities sum to one to 1e-6 after every history, seen or not; all are above 0."""
    arpa = Arpa(kneser_ney_arpa(sentences, VOCABULARY, order))
    for history in histories_below(min(order, 4)):
        each = [arpa.probability(history, word) for word in [*VOCABULARY, "</s>"]]
        assert min(each) > 0
        assert sum(each) == pytest.approx(1, abs=1e-6)


@settings(max_examples=12, deadline=None)
@given(corpora, st.integers(1, 3))
def test_every_probability_is_the_published_one(sentences: Sentences, order: int) -> None:
    """A direct recursion of the formula gives the same P(w | h) for every word and history."""
    arpa = Arpa(kneser_ney_arpa(sentences, VOCABULARY, order))
    reference = Reference(sentences, order)
    for history in histories_below(order):
        for word in [*VOCABULARY, "</s>"]:
            expected = reference.probability(history, word)
            assert arpa.probability(history, word) == pytest.approx(expected, rel=1e-6)


def test_a_corpus_with_all_counts_of_counts() -> None:
    """The published discounts are used if they exist at each order, as the recursion does."""
    words = random.Random(3)
    weights = [8, 4, 2, 1]
    sentences = [words.choices(VOCABULARY, weights, k=words.randint(2, 7)) for _ in range(40)]
    arpa, reference = Arpa(kneser_ney_arpa(sentences, VOCABULARY, 4)), Reference(sentences, 4)
    discounts = reference.discounts(4)
    assert len(set(discounts)) == 4
    for history in [("a", "b", "a"), ("<s>", "b", "c"), ("d", "a")]:
        for word in [*VOCABULARY, "</s>"]:
            expected = reference.probability(history, word)
            assert arpa.probability(history, word) == pytest.approx(expected, rel=1e-6)


def test_published_discounts() -> None:
    """D1, D2 and D3+ follow from n1 = 8, n2 = 4, n3 = 2 and n4 = 1: Y = 1/2."""
    times = [1] * 8 + [2] * 4 + [3] * 2 + [4] + [9]
    counts = Counter({(str(number),): count for number, count in enumerate(times)})
    assert discounts_of(counts) == Discounts(1 - 0.5, 2 - 3 / 4, 3 - 4 / 4)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1, 1, 2], Discounts(0.5, 0.5, 0.5)),  # no n3: Y = 2 / (2 + 2)
        ([1, 1, 2, 3], Discounts(0.5, 0.5, 0.5)),  # no n4
        ([1, 1, 2, 3, 3, 4], Discounts(0.5, 0.5, 0.5)),  # D2 = 2 - 3 / 2 * 2 is below 0
        ([1, 1, 3, 4], NO_COUNTS),  # no n2
        ([2, 2, 3, 4], NO_COUNTS),  # no n1
    ],
)
def test_discounts_where_counts_of_counts_are_missing(
    times: list[int], expected: Discounts
) -> None:
    """Without n3 or n4, or below 0, there is one discount; without n1 or n2, the fixed three."""
    counts = Counter({(str(number),): count for number, count in enumerate(times)})
    assert discounts_of(counts) == expected


def test_a_word_seen_after_one_word_alone_is_rare_elsewhere() -> None:
    """A word that always follows "san" has a lower P after others than one in many places."""
    sentences = [["san", "francisco"]] * 6 + [[word, "is"] for word in ("a", "b", "c", "d")]
    vocabulary = ["a", "b", "c", "d", "francisco", "is", "san"]
    arpa = Arpa(kneser_ney_arpa(sentences, vocabulary, 2))
    assert arpa.probability((), "is") > 2 * arpa.probability((), "francisco")
    assert arpa.probability(("san",), "francisco") > 0.7


def test_unknown_words_are_left_types_and_never_predicted() -> None:
    """Words after an unknown word count; no listed n-gram holds the unknown word."""
    text = kneser_ney_arpa([["a", UNKNOWN, "b", "a"]], VOCABULARY, 3)
    listed = {entry.ngram for entry in read_arpa(text)}
    assert ("b", "a") in listed
    assert ("b", "a", "</s>") in listed
    assert all(UNKNOWN not in ngram for ngram in listed)
    total = sum(Arpa(text).probability(("a",), word) for word in [*VOCABULARY, "</s>"])
    assert math.isclose(total, 1, abs_tol=1e-6)


def test_a_discount_of_zero_is_no_discount() -> None:
    """Counts of counts 3, 3, 6, 1 make D2 = 0: all three are then y = 3 / (3 + 2 x 3)."""
    counts = [1] * 3 + [2] * 3 + [3] * 6 + [4]
    adjusted = Counter({(str(number),): count for number, count in enumerate(counts)})
    assert discounts_of(adjusted) == Discounts(1 / 3, 1 / 3, 1 / 3)


def test_only_histories_have_back_off_weights() -> None:
    """Unigrams back off to nothing; and the mark of unknown words is no word of any text."""
    counts = count_ngrams([["a", "b"], ["a"]], VOCABULARY, 2)
    assert set(kneser_ney(counts).backoff_weights) == {("<s>",), ("a",), ("b",)}
    assert UNKNOWN.split() == []
