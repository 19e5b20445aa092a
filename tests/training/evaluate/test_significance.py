"""The permutation test is exact: SciPy's, the enumeration's, and of its own level under chance."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.evaluate.significance import SpeakerCounts, compare, permutation_p_value, resample

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


def test_the_p_value_is_scipys() -> None:
    """SciPy's exact test of paired samples gives the same p-value."""
    generator = np.random.default_rng(7)
    one, other = generator.integers(0, 40, (2, 12))
    reference = stats.permutation_test(
        (one, other),
        lambda a, b, axis: (a - b).sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    assert permutation_p_value(one - other) == pytest.approx(reference.pvalue, abs=1e-12)


def test_a_gain_at_every_speaker_is_as_rare_as_the_signs() -> None:
    """Of n speakers who all gain, two of 2^n choices of signs are as far from 0."""
    gains = np.arange(1, 31)
    assert permutation_p_value(gains) == pytest.approx(2.0**-29, rel=1e-3)
    assert permutation_p_value(np.zeros(5, np.int64)) == 1.0


def test_many_speakers_are_counted_too() -> None:
    """With 10,000 speakers the distribution is the normal one, and takes a moment."""
    some = np.random.default_rng(1).integers(-9, 10, 10_000)
    deviation = np.sqrt((some.astype(float) ** 2).sum())
    expected = 2 * stats.norm.sf((abs(some.sum()) - 1) / deviation)  # sums are two apart
    assert 0.01 < expected < 0.99
    assert permutation_p_value(some) == pytest.approx(expected, rel=0.005)


def test_equal_models_are_seldom_told_apart() -> None:
    """p is at most 0.05 in 5 % of the worlds, or fewer, where the labels mean nothing."""
    generator = np.random.default_rng(2)
    drawn = generator.integers(-20, 21, (600, 25))
    rejected = sum(permutation_p_value(each) <= 0.05 for each in drawn)
    assert 12 <= rejected <= 45


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
