"""Word errors against a programme by hand, files of them, and statistics over speakers by SciPy."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from training.evaluate.scores import Estimate, SpeakerCounts, compare, permutation_p_value, resample
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


differences = st.lists(st.integers(-30, 30), max_size=9).map(lambda some: np.array(some, np.int64))


@given(differences)
def test_all_signs_are_counted(some: np.ndarray) -> None:
    """The p-value is that of the enumeration of all choices of signs; it knows no direction."""
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, some.tolist(), strict=True)))
        for signs in product((-1, 1), repeat=len(some))
    ]
    expected = sum(each >= abs(int(some.sum())) for each in sums) / len(sums)
    assert permutation_p_value(some) == pytest.approx(expected, abs=1e-12)
    assert permutation_p_value(-some) == pytest.approx(expected, abs=1e-12)


def test_many_speakers_are_counted_too() -> None:
    """With 10,000 speakers the distribution is the normal one, and takes a moment."""
    some = np.random.default_rng(1).integers(-9, 10, 10_000)
    deviation = np.sqrt((some.astype(float) ** 2).sum())
    expected = 2 * ndtr((1 - abs(some.sum())) / deviation)  # sums are two apart
    assert 0.01 < expected < 0.99
    assert permutation_p_value(some) == pytest.approx(expected, rel=0.005)


def test_a_comparison_turns_with_its_models() -> None:
    """The models' roles change the sign of what is gained, and no p-value."""
    words = np.full(4, 50)
    errors = {"a": np.array([9, 8, 7, 9]), "b": np.array([5, 6, 8, 7])}
    counts = SpeakerCounts(tuple("wxyz"), words, errors)
    drawn = resample(counts)
    there, back = compare(drawn, "a", "b"), compare(drawn, "b", "a")
    assert there.reduction.value == pytest.approx(100 * 7 / 33)
    assert back.reduction.value == pytest.approx(-100 * 7 / 26)
    assert there.p_value == back.p_value == pytest.approx(4 / 16)
    assert there.share_without_gain < 0.05
    assert back.share_without_gain > 0.95
    assert there.to_json() == {
        "reduction": there.reduction.to_json(),
        "p_value": there.p_value,
        "share_without_gain": there.share_without_gain,
    }


def draw_speakers(generator: np.random.Generator, num_speakers: int) -> SpeakerCounts:
    """Draw speakers who differ in rate; models of 30, 24 and 18 % WER: WERR 20, recovery 50 %."""
    rates = generator.beta(3, 7, num_speakers)  # of mean 0.3
    gains = generator.beta(8, 2, num_speakers)  # of mean 0.8: some speakers gain, some do not
    words = generator.integers(50, 90, num_speakers)
    drawn = {
        "baseline": generator.binomial(words, rates),
        "student": generator.binomial(words, rates * gains),
        "oracle": generator.binomial(words, rates * 0.6),
    }
    return SpeakerCounts(tuple(f"s{i:03d}" for i in range(num_speakers)), words, drawn)


def utterance(name: str, speaker: str, words: int, **errors: int) -> UtteranceErrors:
    counts = {model: WordErrors(n, reference_words=words) for model, n in errors.items()}
    return UtteranceErrors(name, speaker, "all", 1, counts)


SOME = [
    utterance("u1", "ann", 10, baseline=4, student=3),
    utterance("u2", "ann", 6, baseline=1, student=1),
    utterance("u3", "bob", 9, baseline=3, student=4),
    utterance("u4", "eve", 20, baseline=8, student=2),
]


def test_utterances_add_up_by_speaker() -> None:
    """Counts are sums over a speaker's utterances, and rates are pooled over all words."""
    counts = SpeakerCounts.of(SOME)
    assert counts.speakers == ("ann", "bob", "eve")
    assert counts.words.tolist() == [16, 9, 20]
    assert counts.errors["baseline"].tolist() == [5, 3, 8]
    drawn = resample(counts)
    assert drawn.word_error_rate("student").value == pytest.approx(100 * 10 / 45)
    assert drawn.reduction("baseline", "student").value == pytest.approx(werr(16 / 45, 10 / 45))
    assert drawn.share_without_gain("student", "baseline") > 0.5


def test_the_unit_is_the_speaker() -> None:
    """Other cuts of a speaker's words into utterances, or another order, change no bit."""
    merged = [utterance("u", "ann", 16, baseline=5, student=4), *SOME[2:]]
    expected = resample(SpeakerCounts.of(SOME)).reduction("baseline", "student")
    for other in (merged, SOME[::-1]):
        assert resample(SpeakerCounts.of(other)).reduction("baseline", "student") == expected
    # As if heard in two placements, or with two seeds: more words, and no more speakers.
    assert resample(SpeakerCounts.of([*SOME, *SOME])).reduction("baseline", "student") == expected


def test_intervals_are_scipys() -> None:
    """Percentile intervals of paired draws agree with SciPy's own bootstrap."""
    from scipy import stats  # noqa: PLC0415 - 2 s, for this test alone

    counts = draw_speakers(np.random.default_rng(5), 40)
    drawn = resample(counts)
    words, before, after, best = counts.words, *counts.errors.values()
    samples = {
        "wer": ((after, words), lambda a, w, axis: 100 * a.sum(axis) / w.sum(axis)),
        "werr": ((before, after), lambda b, a, axis: 100 * (b - a).sum(axis) / b.sum(axis)),
        "recovery": (
            (before, after, best),
            lambda b, a, o, axis: 100 * (b - a).sum(axis) / (b - o).sum(axis),
        ),
    }
    ours = {
        "wer": drawn.word_error_rate("student"),
        "werr": drawn.reduction("baseline", "student"),
        "recovery": drawn.recovery("baseline", "student", "oracle"),
    }
    for name, (data, statistic) in samples.items():
        interval = stats.bootstrap(
            data, statistic, paired=True, method="percentile", rng=np.random.default_rng(1)
        ).confidence_interval
        width = interval.high - interval.low
        assert ours[name].low == pytest.approx(interval.low, abs=0.05 * width)
        assert ours[name].high == pytest.approx(interval.high, abs=0.05 * width)
        assert ours[name].low < ours[name].value < ours[name].high


def test_models_are_compared_on_the_same_draws() -> None:
    """A model with 10 % fewer errors on every speaker has a WERR without any spread."""
    counts = draw_speakers(np.random.default_rng(3), 30)
    exact = replace(counts, errors={"a": 10 * counts.words, "b": 9 * counts.words})
    drawn = resample(exact)
    assert drawn.reduction("a", "b") == Estimate(10.0, 10.0, 10.0)
    assert resample(exact).errors["a"].tobytes() == drawn.errors["a"].tobytes()
    assert resample(exact, seed=18).errors["a"].tobytes() != drawn.errors["a"].tobytes()


def test_one_speaker_bounds_nothing() -> None:
    """The interval of a single speaker is infinite, and null in a file."""
    found = resample(SpeakerCounts.of(SOME[:2])).word_error_rate("student")
    assert (found.low, found.high) == (-np.inf, np.inf)
    assert found.to_json() == {"value": 25.0, "low": None, "high": None}


def test_draws_without_a_meaning_widen_the_interval() -> None:
    """Recovery has a wider interval where the oracle gains nothing in some draws."""
    sure = [utterance(f"s{n}", f"s{n}", 9, a=5, b=4, o=3) for n in range(40)]
    odd = utterance("odd", "odd", 9, a=5, b=4, o=60)
    assert resample(SpeakerCounts.of(sure)).recovery("a", "b", "o") == Estimate(50.0, 50.0, 50.0)
    found = resample(SpeakerCounts.of([*sure, odd])).recovery("a", "b", "o")
    assert found.value == pytest.approx(100 * 41 / 25)
    assert found.low == -np.inf
    assert found.high == np.inf


def test_what_cannot_be_compared_is_refused() -> None:
    """No errors to reduce, an oracle that gains nothing, an absent model, no words: all named."""
    flat = [utterance("u", "s", 9, a=0, b=1, o=0), utterance("v", "t", 9, a=0, b=1, o=0)]
    drawn = resample(SpeakerCounts.of(flat))
    with pytest.raises(ValueError, match="a has 0 errors: need at least 1"):
        drawn.reduction("a", "b")
    with pytest.raises(ValueError, match="o has 0 errors, a 0: need fewer"):
        drawn.recovery("a", "b", "o")
    with pytest.raises(ValueError, match="u1: no model a: there are baseline, student"):
        SpeakerCounts.of([*flat, *SOME])
    with pytest.raises(ValueError, match="0 speakers without a reference word"):
        SpeakerCounts.of([])
