"""N-gram models against the published formulas, ARPA text that is read, and the grammars of both.

Chen & Goodman 1999, equations 20 to 26; counts of n-grams that begin with <s> as in KenLM.
"""

import io
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.decode.small_ngrams import (
    PREDICTED,
    VOCABULARY,
    Asked,
    Sentences,
    Words,
    corpora,
    histories_below,
)
from training.decode.arpa import read_arpa, restricted
from training.decode.const_fst import ConstFst
from training.decode.grammar import ngram_grammar
from training.decode.lexicon import UNKNOWN
from training.decode.ngrams import NO_COUNTS, BackoffModel, discounts_of, kneser_ney, witten_bell


class Reference:
    """Reference computes each probability from the sentences, without any stored table."""

    def __init__(
        self, sentences: Sentences, order: int, min_counts: Sequence[int] = (1, 1, 1, 1, 1)
    ) -> None:
        self.padded = [("<s>", *sentence, "</s>") for sentence in sentences]
        self.order, self.min_counts = order, min_counts
        self.predicted = PREDICTED
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
        are_listed = [self.is_listed((*history, each)) for each in self.predicted]
        gamma = sum(
            discount[min(each, 3)] if is_listed else each
            for each, is_listed in zip(counts, are_listed, strict=True)
        ) / sum(counts)
        kept = own - discount[min(own, 3)] if self.is_listed((*history, word)) else 0
        return kept / sum(counts) + gamma * lower

    def is_listed(self, words: Words) -> bool:
        return len(words) == 1 or self.occurrences(words) >= self.min_counts[len(words) - 1]


def read(text: str) -> BackoffModel:
    return read_arpa(io.StringIO(text))


@settings(max_examples=40, deadline=None)
@given(corpora, st.integers(1, 5), st.sampled_from([kneser_ney, witten_bell]))
def test_probabilities_sum_to_one_after_every_history(
    sentences: Sentences, order: int, estimate: Callable[[Sentences, list[str], int], BackoffModel]
) -> None:
    """Probabilities sum to one to 1e-6 after every history, seen or not; all are above 0."""
    asked = Asked(estimate(sentences, VOCABULARY, order))
    for history in histories_below(min(order, 4)):
        each = [asked.probability(history, word) for word in PREDICTED]
        assert min(each) > 0
        assert sum(each) == pytest.approx(1, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(corpora, st.integers(2, 4), st.integers(0, 9))
def test_a_search_finds_what_a_searched_model_lists(
    sentences: Sentences, order: int, seed: int
) -> None:
    """Where n-grams are dearer than their back-off, the search's cheaper way is the only one."""
    model = kneser_ney(sentences, VOCABULARY, order)
    dearer = model.ngrams.copy()
    dearer["log_probability"] -= np.random.default_rng(seed).exponential(0.5, len(dearer))
    given_model = replace(model, ngrams=dearer)
    asked, found = Asked(given_model), Asked(given_model.as_searched())

    def cheapest(history: Words, word: str) -> float:
        entry = asked.entries.get((*history, word))
        listed = 10**entry.log_probability if entry else 0.0
        if not history:
            return listed
        weight = 10 ** asked.entries[history].log_backoff if history in asked.entries else 1.0
        return max(listed, weight * cheapest(history[1:], word))

    for history in histories_below(order):
        for word in PREDICTED:
            expected = cheapest(history, word)
            assert found.probability(history, word) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=12, deadline=None)
@given(corpora, st.integers(1, 3))
def test_every_probability_is_the_published_one(sentences: Sentences, order: int) -> None:
    """A direct recursion of the formula gives the same P(w | h) for every word and history."""
    asked = Asked(kneser_ney(sentences, VOCABULARY, order))
    reference = Reference(sentences, order)
    for history in histories_below(order):
        for word in PREDICTED:
            expected = reference.probability(history, word)
            assert asked.probability(history, word) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("min_counts", [(1, 1, 2), (1, 2, 2), (1, 2, 3)])
def test_rare_ngrams_leave_their_mass_to_shorter_ones(min_counts: tuple[int, ...]) -> None:
    """As in KenLM: by counts of the text, discounts of all n-grams; listed are the others alone."""
    words = random.Random(5)
    sentences = [words.choices(VOCABULARY, [6, 3, 2, 1], k=words.randint(1, 6)) for _ in range(25)]
    model = kneser_ney(sentences, VOCABULARY, 3, min_counts)
    asked, reference = Asked(model), Reference(sentences, 3, min_counts)
    everything = {entry.ngram for entry in kneser_ney(sentences, VOCABULARY, 3)}
    frequent = {each for each in everything if reference.is_listed(each)}
    assert asked.entries.keys() == frequent != everything
    for history in histories_below(3):
        for word in PREDICTED:
            expected = reference.probability(history, word)
            assert asked.probability(history, word) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(corpora, st.integers(2, 4), st.sampled_from([kneser_ney, witten_bell]))
def test_without_rare_ngrams_probabilities_sum_to_one(
    sentences: Sentences,
    order: int,
    estimate: Callable[[Sentences, list[str], int, tuple[int, ...]], BackoffModel],
) -> None:
    """The last least count holds for all longer n-grams, here of three and four words."""
    asked = Asked(estimate(sentences, VOCABULARY, order, (1, 1, 2)))
    for history in histories_below(order):
        assert asked.total(history) == pytest.approx(1, abs=1e-6)


def test_a_corpus_with_all_counts_of_counts() -> None:
    """The published discounts are used if they exist at each order, as the recursion does."""
    words = random.Random(3)
    weights = [8, 4, 2, 1]
    sentences = [words.choices(VOCABULARY, weights, k=words.randint(2, 7)) for _ in range(40)]
    asked, reference = Asked(kneser_ney(sentences, VOCABULARY, 4)), Reference(sentences, 4)
    discounts = reference.discounts(4)
    assert len(set(discounts)) == 4
    for history in [("a", "b", "a"), ("<s>", "b", "c"), ("d", "a")]:
        for word in PREDICTED:
            expected = reference.probability(history, word)
            assert asked.probability(history, word) == pytest.approx(expected, rel=1e-6)


def test_published_discounts() -> None:
    """D1, D2 and D3+ follow from n1 = 8, n2 = 4, n3 = 2 and n4 = 1: Y = 1/2."""
    times = [1] * 8 + [2] * 4 + [3] * 2 + [4] + [9]
    assert discounts_of(np.array(times)) == (0.0, 1 - 0.5, 2 - 3 / 4, 3 - 4 / 4)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1, 1, 2], (0.0, 0.5, 0.5, 0.5)),  # no n3: Y = 2 / (2 + 2)
        ([1, 1, 2, 3], (0.0, 0.5, 0.5, 0.5)),  # no n4
        ([1, 1, 2, 3, 3, 4], (0.0, 0.5, 0.5, 0.5)),  # D2 = 2 - 3 / 2 * 2 is below 0
        ([1, 1, 1, 2, 2, 2, *[3] * 6, 4], (0.0, 1 / 3, 1 / 3, 1 / 3)),  # D2 = 0: y = 3 / (3 + 6)
        ([1, 1, 3, 4], NO_COUNTS),  # no n2
        ([2, 2, 3, 4], NO_COUNTS),  # no n1
    ],
)
def test_discounts_where_counts_of_counts_are_missing(
    times: list[int], expected: tuple[float, ...]
) -> None:
    """Without n3 or n4, or below 0, there is one discount; without n1 or n2, the fixed three."""
    assert discounts_of(np.array(times)) == expected


def test_unknown_words_are_left_types_and_never_predicted() -> None:
    """Words after an unknown word count; no listed n-gram holds the unknown word."""
    model = kneser_ney([["a", UNKNOWN, "b", "a"]], VOCABULARY, 3)
    listed = {entry.ngram for entry in model}
    assert ("b", "a") in listed
    assert ("b", "a", "</s>") in listed
    assert all(UNKNOWN not in ngram for ngram in listed)
    total = sum(Asked(model).probability(("a",), word) for word in PREDICTED)
    assert math.isclose(total, 1, abs_tol=1e-6)


SENTENCES = [["a", "b"], ["a", "b", "c"], ["b"], [], ["a", "a", "b"]]


def test_bigram_by_hand() -> None:
    """P(b | a) = (c(ab) + T(a) P(b)) / (N(a) + T(a)), P(b) = (c(b) + T / V) / (N + T)."""
    asked = Asked(witten_bell(SENTENCES, VOCABULARY, 2))
    unigram = (4 + 4 / 5) / (14 + 4)  # a b c </s> occur, 14 tokens, 5 words with d
    assert asked.probability((), "b") == pytest.approx(unigram, rel=1e-5)
    assert asked.probability(("a",), "b") == pytest.approx((3 + 2 * unigram) / (4 + 2), rel=1e-5)


def _grammar_cost(grammar: ConstFst, sentence: Sequence[str]) -> float:
    """Return the cost of the path that backs off only if it must; labels 1.. are words, 9 is #0."""
    state, cost = grammar.start, 0.0
    for word in [*sentence, None]:
        while True:
            final_cost, first, num_arcs, *_ = grammar.states[state].tolist()
            arcs = {arc[0]: arc for arc in grammar.arcs[first : first + num_arcs].tolist()}
            if word is None and math.isfinite(final_cost):
                return float(cost + final_cost)
            wanted = VOCABULARY.index(word) + 1 if word is not None else 9
            label, _, arc_cost, state = arcs.get(wanted) or arcs[9]
            cost += arc_cost
            if label != 9:
                break
    raise AssertionError


@pytest.mark.parametrize("order", [1, 2, 3])
def test_grammar_scores_sentences_as_the_arpa_text_does(order: int) -> None:
    """The acceptor scores every sentence of up to three words as the ARPA reader does."""
    model = witten_bell(SENTENCES, VOCABULARY, order)
    word_ids = {word: i + 1 for i, word in enumerate(VOCABULARY)} | {"#0": 9}
    grammar, asked = ngram_grammar(model, word_ids), Asked(model)
    for length in range(4):
        for sentence in itertools.product(VOCABULARY, repeat=length):
            history: tuple[str, ...] = ("<s>",)
            cost = 0.0
            for word in (*sentence, "</s>"):
                context = history[max(0, len(history) - order + 1) :] if order > 1 else ()
                cost -= math.log(asked.probability(context, word))
                history = (*history, word)
            assert _grammar_cost(grammar, sentence) == pytest.approx(cost, abs=1e-3)


def test_words_outside_the_vocabulary_are_refused() -> None:
    """Words outside the vocabulary are refused, and the error names the word and the remedy."""
    with pytest.raises(ValueError, match=r"'e': add it to lexicon\.txt"):
        witten_bell([["a", "e"]], VOCABULARY, 3)
    with pytest.raises(ValueError, match="no sentences"):
        witten_bell([], VOCABULARY, 3)
    with pytest.raises(ValueError, match="order = 0"):
        witten_bell(SENTENCES, VOCABULARY, 0)


ARPA = """\
Estimated by hand.
\\data\\
ngram 1=5
ngram 2=4
ngram 3=1

\\1-grams:
-99\t<s>\t-0.3
-1\t</s>
-0.5\ta\t-0.2
-0.7\tb\t-0.1
-0.9\twasp\t-0.4

\\2-grams:
-0.25\t<s> a\t-0.5
-0.5\ta b\t0.1
-0.6\ta wasp
-0.4\tb </s>

\\3-grams:
-0.125\t<s> a b

\\end\\
"""


def test_longer_ngrams_alone_are_refused() -> None:
    """The history of the first one is named."""
    text = ARPA.replace("ngram 2=4", "ngram 2=0")
    text = text[: text.index("-0.25")] + text[text.index("\\3-grams") :]
    with pytest.raises(ValueError, match="'<s> a b': its history has no entry"):
        read(text)


def test_a_word_may_hold_other_blanks() -> None:
    """Such as a no-break space of text from the web, which is none of ARPA's."""
    text = ARPA.replace("wasp", "was\u00a0p").replace("\t", " \t")
    assert [each.ngram for each in read(text)][4:7:2] == [("was\u00a0p",), ("a", "b")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-0.5\ta\t", "nan\ta\t", r"line 10: nan and -0\.2: need a log10 probability of -100"),
        ("-0.5\ta\t", "-inf\ta\t", "line 10: -inf and"),
        ("-0.5\ta\t", "-1e38\ta\t", r"line 10: -1e38 and -0\.2: need .* -99 for none"),
        ("-0.5\ta\t", "0.5\ta\t", r"line 10: 0\.5 and -0\.2: need .* of -100 to 0"),
        ("\ta b\t0.1", "\ta b\tinf", r"line 16: -0\.5 and inf: need"),
        ("\ta b\t0.1", "\ta b\t1e39", r"line 16: -0\.5 and 1e\+39: need .* of -100 to 100"),
        ("\ta b\t0.1", "\ta b\t-100.5", r"line 16: -0\.5 and -100\.5: need .* of -100 to 100"),
        ("\ta b\t0.1", "\ta b\tnan", r"line 16: -0\.5 and nan: need"),
        ("-0.5\ta b\t0.1", "-0.5\ta b c", "line 16: need log10 probabilities"),
        ("-0.5\ta b\t0.1", "-0.5\ta", "line 16: 2 fields: need a probability and 2 words"),
        ("-0.6\ta wasp", "-0.5\ta b", "line 17: 'a b': there twice: remove one"),
        ("-0.6\ta wasp", "-0.5\tbee a", "line 17: 'bee a': its history has no entry"),
        ("-0.6\ta wasp", "-0.5\ta <s>", "line 17: 'a <s>': need <s> first and </s> last only"),
        ("-0.6\ta wasp\n", "", "line 19: 3 2-grams end here: need the 4 that"),
        ("ngram 2=4\n", "", r"line 4: 'ngram 3=1': need `ngram 2=COUNT`"),
        ("ngram 3=1", "ngram 3=many", "line 5: 'ngram 3=many': need `ngram 3=COUNT`"),
        ("ngram 3=1", "ngram 3=-1", "line 5: 'ngram 3=-1': need `ngram 3=COUNT`"),
        ("\\3-grams:", "\\4-grams:", r"line 20: .*4-grams:': need .3-grams: here"),
        ("ngram 3=1\n", "", r"line 19: .*3-grams:': need .end. here"),
        (
            "\\3-grams:\n-0.125\t<s> a b\n",
            "",
            r"line 21: .end.: need the n-grams of lengths 1\.\.3",
        ),
        ("\\end\\\n", "", r"ends without .end.: it was cut off: write or copy it again"),
        ("\\data\\", "", "not an ARPA language model"),
        (
            "-0.6\ta wasp",
            "-0.6\ta fly",
            "line 17: 'a fly': its last word has no unigram: list it too",
        ),
    ],
)
def test_what_is_malformed_is_refused_by_its_line(old: str, new: str, message: str) -> None:
    """Numbers, fields, order and counts are checked; the error has the line and a remedy."""
    assert ARPA.count(old) == 1
    assert len([*read(ARPA)]) == 10
    with pytest.raises(ValueError, match=message):
        read(ARPA.replace(old, new))


@pytest.mark.parametrize("weight", ["-100", "100"])
def test_a_weight_at_the_bound_is_read(weight: str) -> None:
    """And so is the ARPA that a toolkit writes for a history that never backs off, -99."""
    (entry,) = [
        each
        for each in read(ARPA.replace("\ta b\t0.1", f"\ta b\t{weight}"))
        if each.ngram == ("a", "b")
    ]
    assert entry.log_backoff == float(weight)


def test_foreign_words_are_dropped_and_counted() -> None:
    """N-grams with a word outside the lexicon go; the others keep their numbers exactly."""
    found = restricted(read(ARPA), {"a", "b", "bee"})
    counts = found.num_dropped_words, found.num_dropped_ngrams
    assert counts == (1, 2)
    assert found.num_missing_words == 1
    assert [*found.model] == [entry for entry in read(ARPA) if "wasp" not in entry.ngram]
    ngram_grammar(found.model, {"a": 1, "b": 2, "bee": 3, "#0": 4})


def test_a_model_without_words_or_ends_is_refused() -> None:
    """A model must end sentences and share a word with the lexicon."""
    with pytest.raises(ValueError, match=r"no word of lexicon\.txt: need the lexicon's spelling"):
        restricted(read(ARPA), {"A", "B"})
    without_end = ARPA.replace("-1\t</s>\n", "").replace("ngram 1=5", "ngram 1=4")
    without_end = without_end.replace("-0.4\tb </s>\n", "").replace("ngram 2=4", "ngram 2=3")
    with pytest.raises(ValueError, match="has no unigram </s>: need it to end sentences"):
        restricted(read(without_end), {"a", "b"})
