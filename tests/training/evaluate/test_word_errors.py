"""Compare word errors with a dynamic programme written out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.evaluate.word_errors import WordErrors, werr, word_errors

words = st.lists(st.sampled_from("abc"), max_size=7)


def _levenshtein(reference: list[str], hypothesis: list[str]) -> int:
    row = list(range(len(hypothesis) + 1))
    for i, expected in enumerate(reference, start=1):
        previous, row[0] = row[0], i
        for j, found in enumerate(hypothesis, start=1):
            substitution = previous + (expected != found)
            previous = row[j]
            row[j] = min(substitution, row[j] + 1, row[j - 1] + 1)
    return row[-1]


@given(words, words)
def test_errors_are_the_levenshtein_distance(reference: list[str], hypothesis: list[str]) -> None:
    """Substitutions, insertions and deletions sum to the distance and explain both lengths."""
    counts = word_errors(reference, hypothesis)
    assert counts.errors == _levenshtein(reference, hypothesis)
    assert counts.reference_words == len(reference)
    assert len(hypothesis) - len(reference) == counts.insertions - counts.deletions


def test_errors_add_over_utterances() -> None:
    """The rate of several utterances is that of the sums, not the mean of the rates."""
    total = word_errors(["a"], ["b"]) + word_errors(["a", "b", "c"], ["a", "c"])
    assert total == WordErrors(substitutions=1, insertions=0, deletions=1, reference_words=4)
    assert total.word_error_rate == 50.0


def test_reduction_is_relative_to_the_baseline() -> None:
    """41.7 to 34.9 percent is 16 percent fewer errors; more errors are a negative reduction."""
    assert werr(41.7, 34.9) == pytest.approx(16.3, abs=0.01)
    assert werr(20.0, 25.0) == -25.0


def test_a_missing_reference_is_refused() -> None:
    """No reference words, or a baseline without errors, is refused."""
    with pytest.raises(ValueError, match="no reference words"):
        _ = WordErrors().word_error_rate
    with pytest.raises(ValueError, match=r"baseline word error rate = 0\.0"):
        werr(0.0, 1.0)
