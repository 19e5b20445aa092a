"""Word errors: against a programme by hand, and by utterance, written, read and joined."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.evaluate.word_errors import (
    UtteranceErrors,
    WordErrors,
    joined,
    of_models,
    read_errors,
    werr,
    word_errors,
    write_errors,
)

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


names = st.text(min_size=1, max_size=9)
counts = st.integers(0, 99)


@st.composite
def utterances(draw) -> UtteranceErrors:
    words = draw(counts)
    models = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    errors = {name: WordErrors(*draw(st.tuples(counts, counts, counts)), words) for name in models}
    return UtteranceErrors(draw(names), draw(names), draw(names), draw(counts), errors)


@settings(max_examples=40)
@given(st.lists(utterances(), max_size=3))
def test_files_are_read_as_they_were_written(some: list[UtteranceErrors]) -> None:
    """Every name and count returns, line by line, whatever letters are in the names."""
    data = write_errors(some)
    assert read_errors(data) == some
    assert data.isascii()
    assert data.count(b"\n") == len(some)


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"errors": {}, "reference_words": 1}'])
def test_another_line_is_named(line: bytes) -> None:
    """A file of something else is refused by its first such line."""
    good = write_errors([UtteranceErrors("u", "s", "all", 1, {"m": WordErrors()})])
    with pytest.raises(ValueError, match=r"line 2 is .*: need word errors by utterance"):
        read_errors(good + line)


def of(model: str, words: int = 4, **changed: str) -> UtteranceErrors:
    one = UtteranceErrors("u", "s", "all", 9, {model: WordErrors(1, reference_words=words)})
    return replace(one, **changed)


def test_evaluations_are_put_side_by_side() -> None:
    """An oracle's run joins the others by utterance id, in any order, under a name of its own."""
    first = [of("baseline"), of("baseline", utterance_id="v")]
    oracle = of_models(reversed(first), {"baseline": "oracle"})
    both = joined(first, oracle)
    assert [(each.utterance_id, list(each.errors)) for each in both] == [
        ("u", ["baseline", "oracle"]),
        ("v", ["baseline", "oracle"]),
    ]
    with pytest.raises(ValueError, match="model baseline is in two evaluations"):
        joined(first, first)


def test_evaluations_of_other_speech_are_refused() -> None:
    """Other utterances, transcripts, speakers and placements are named."""
    first = [of("a")]
    with pytest.raises(ValueError, match="1 and 2 utterances"):
        joined([of("a"), of("a", utterance_id="v")], [of("b")])
    with pytest.raises(ValueError, match="u is in one evaluation alone"):
        joined(first, [of("b", utterance_id="v")])
    with pytest.raises(ValueError, match=r"u has \[4, 5\] words of s at all"):
        joined(first, [of("b", 5)])
    for changed in ({"speaker_id": "t"}, {"placement": "DP1"}):
        with pytest.raises(ValueError, match="need evaluations of one corpus"):
            joined(first, [of("b", **changed)])
