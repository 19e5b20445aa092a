"""Entropy pruning against its definition: Stolcke 1998, on models of four words."""

import io
import math
from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.decode.small_ngrams import (
    PREDICTED,
    Asked,
    Sentences,
    Words,
    corpora,
    histories_below,
)
from training.decode.arpa import read_arpa, restricted
from training.decode.entropy_pruning import Masses, pruned
from training.decode.ngrams import BackoffModel, arpa_text, kneser_ney, witten_bell

Estimate = Callable[[Sentences, list[str], int], BackoffModel]
estimates = st.sampled_from([kneser_ney, witten_bell])
THRESHOLDS = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


def probability_of(asked: Asked, history: Words) -> float:
    """Return P(h) by the chain rule; a sentence begins as often as one ends."""
    found = 1.0
    for place, word in enumerate(history):
        of_word = (history[:place], word) if word != "<s>" else ((), "</s>")
        found *= asked.probability(*of_word)
    return found


def divergence_without(asked: Asked, histories: Asked, *ngrams: Words) -> float:
    """Sum P(h) P(w | h) log P(w | h) / P'(w | h) over all words w, where P' lacks n-grams of h."""
    history = ngrams[0][:-1]
    listed = [word for word in PREDICTED if (*history, word) in asked.entries]
    kept = [word for word in listed if (*history, word) not in ngrams]
    others = [word for word in PREDICTED if word not in kept]
    weight = (1 - sum(asked.probability(history, word) for word in kept)) / sum(
        asked.probability(history[1:], word) for word in others
    )
    divergence = 0.0
    for word in others:
        before = asked.probability(history, word)
        divergence += before * math.log(before / (weight * asked.probability(history[1:], word)))
    return probability_of(histories, history) * divergence


@settings(max_examples=30, deadline=None)
@given(corpora, st.integers(2, 4), st.sampled_from([(), (1, 1, 2)]), estimates)
def test_what_an_ngram_is_worth_is_the_divergence_without_it(
    sentences: Sentences, order: int, min_counts: tuple[int, ...], estimate: Estimate
) -> None:
    """For each n-gram, computed word by word from the two distributions after its history."""
    model = kneser_ney(sentences, PREDICTED[:-1], order, min_counts)
    histories = estimate(sentences, PREDICTED[:-1], order)
    asked, of_histories = Asked(model), Asked(histories)
    found = Masses.of(model).relative_entropies(histories)[1:]
    for each, entropy in zip(model, found, strict=True):
        is_longer = len(each.ngram) > 1
        expected = divergence_without(asked, of_histories, each.ngram) if is_longer else 0.0
        assert entropy == pytest.approx(expected, rel=1e-9, abs=1e-14)


@settings(max_examples=30, deadline=None)
@given(corpora, st.integers(2, 4), estimates, st.sampled_from(THRESHOLDS))
def test_after_pruning_every_history_sums_to_one(
    sentences: Sentences, order: int, estimate: Estimate, threshold: float
) -> None:
    """Also histories that lost all n-grams; those that stay keep their probability exactly."""
    model = estimate(sentences, PREDICTED[:-1], order)
    before, after = Asked(model), Asked(pruned(model, threshold))
    for history in histories_below(order):
        assert after.total(history) == pytest.approx(1, abs=1e-9)
    for ngram, entry in after.entries.items():
        assert entry.log_probability == before.entries[ngram].log_probability


@settings(max_examples=20, deadline=None)
@given(corpora, st.integers(2, 4), estimates)
def test_what_stays_is_what_the_threshold_says(
    sentences: Sentences, order: int, estimate: Estimate
) -> None:
    """N-grams of at least so much, all of full histories, and the histories of such."""
    model = estimate(sentences, PREDICTED[:-1], order)
    worth = dict(
        zip((e.ngram for e in model), Masses.of(model).relative_entropies(model)[1:], strict=True)
    )
    assert pruned(model, 0.0) is model
    for threshold in THRESHOLDS:
        worthy = {ngram for ngram, entropy in worth.items() if math.expm1(entropy) >= threshold}
        worthy |= worth_more_together(Asked(model), worth.keys() - worthy, threshold)
        histories = {ngram[:length] for ngram in worthy for length in range(1, len(ngram))}
        unigrams = {ngram for ngram in worth if len(ngram) == 1}
        kept = {entry.ngram for entry in pruned(model, threshold)}
        assert kept == worthy | histories | unigrams


def worth_more_together(asked: Asked, removed: Iterable[Words], threshold: float) -> set[Words]:
    """Return n-grams of histories that list 0.9 of what is behind, as far as all go at a cost."""
    found: set[Words] = set()
    longer = sorted(ngram for ngram in removed if len(ngram) > 1)
    for history, of_history in groupby(longer, lambda ngram: ngram[:-1]):
        ngrams = [*of_history]
        listed = [word for word in PREDICTED if (*history, word) in asked.entries]
        share = sum(asked.probability(history[1:], word) for word in listed)
        divergence = divergence_without(asked, asked, *ngrams)
        if share >= 0.9 and math.expm1(divergence) >= threshold * len(ngrams):
            found.update(ngrams)
    return found


def test_a_history_that_lists_all_words_is_worth_something() -> None:
    """Each of its n-grams alone takes its old probability from the new back-off weight."""
    sentences = [["yes", "no"] * 3, ["no", "yes"] * 3] * 30 + [["yes", "yes"], ["no", "no"]]
    model = witten_bell([*sentences, ["yes"], ["no"]], ["yes", "no"], 2)
    assert len(pruned(model, 1e-3).ngrams) == len(model.ngrams)
    assert len(pruned(model, 1.0).ngrams) == 1 + len(["yes", "no", "<s>", "</s>"])


def test_a_model_that_does_not_sum_to_one_keeps_its_sums() -> None:
    """As of a user's ARPA without the words that the lexicon lacks: no mass is made up."""
    sentences = [["a", "b", "c"], ["b", "a", "d"], ["a", "b", "d", "c"], ["c", "a", "b"]] * 2
    text = arpa_text(kneser_ney(sentences, PREDICTED[:-1], 3))
    model = restricted(read_arpa(io.StringIO(text)), ["a", "b", "c"]).model
    smaller = pruned(model, 1e-2)
    assert len(smaller.ngrams) < len(model.ngrams)
    before, after = Asked(model), Asked(smaller)
    words = ["a", "b", "c", "</s>"]
    for history in [("a",), ("b",), ("a", "b"), ("<s>", "c"), ("c", "a")]:
        sums = [sum(each.probability(history, word) for word in words) for each in (before, after)]
        assert sums[0] < 0.99
        assert sums[1] == pytest.approx(sums[0], abs=1e-6)


SUFFIX_MISSES = """\
\\data\\
ngram 1=4
ngram 2=2
ngram 3=1

\\1-grams:
-0.6\t</s>
-99\t<s>\t-0.2
-0.5\ta\t-0.3
-0.4\tb\t-0.1

\\2-grams:
-0.2\t<s> a\t-0.4
-0.3\tb b

\\3-grams:
-0.1\t<s> a b

\\end\\
"""


def test_an_ngram_whose_suffix_is_not_listed_backs_off_twice() -> None:
    """Models that a toolkit has pruned have such: `<s> a b` without `a b`."""
    model = read_arpa(io.StringIO(SUFFIX_MISSES))
    backed_off = model.backed_off(model.suffixes(), 3)
    np.testing.assert_allclose(backed_off, [-0.3 - 0.4])  # P(b | a) = weight of a, P(b)
    asked = Asked(pruned(model, 1.0))
    assert asked.probability(("<s>", "a"), "b") > 0


def test_no_word_is_before_a_sentence() -> None:
    """SRILM writes -99 for <s>, KenLM 0: the same n-grams and weights stay."""
    sentences = [["a", "b"], ["b", "b", "a"], ["a", "a", "b"], ["b"]]
    text = arpa_text(kneser_ney(sentences, ["a", "b"], 3))
    start = next(line for line in text.splitlines() if line.startswith("-99"))
    kenlm = text.replace(start, f"0\t{start.partition(chr(9))[2]}")
    for threshold in THRESHOLDS:
        ours, theirs = (
            [e for e in pruned(read_arpa(io.StringIO(each)), threshold) if e.ngram != ("<s>",)]
            for each in (text, kenlm)
        )
        assert ours == theirs
