"""Each figure of mixing against brute force and known orders, and the certificate of an order."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shuffle_quality import (
    Samples,
    autocorrelation,
    certify,
    design_effect,
    effective_number,
    expected_effective_number,
    figures,
    intra_group_correlation,
    predicted_design_effect,
    rank_displacement,
)
from pipeline.shuffling import shuffled_order

NUM_FILES, FILE_SAMPLES, BATCH_SIZE, CORRELATION = 2048, 500, 512, 0.1


def batches_of(num_samples: int, batch_size: int) -> np.ndarray:
    return np.arange(num_samples) // batch_size


SAMPLES = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n).map(sorted),
        st.lists(st.integers(0, 5), min_size=n, max_size=n),
        st.lists(st.floats(-10, 10, width=32), min_size=n, max_size=n),
    )
)


@given(SAMPLES)
def test_the_effective_number_counts_pairs(samples) -> None:
    """Of all pairs within minibatches, one in so many shares its group."""
    batches, groups, _ = map(np.array, samples)
    pairs = [
        pair for pair in combinations(range(len(groups)), 2) if len(set(batches[list(pair)])) == 1
    ]
    shared = sum(groups[first] == groups[second] for first, second in pairs)
    expected = len(pairs) / shared if shared else float("inf")
    assert effective_number(batches, groups) == pytest.approx(expected)


@given(SAMPLES)
def test_the_predicted_design_effect_is_a_sum_over_pairs(samples) -> None:
    """The mean over minibatches of 1 + rho times the pairs of a group per sample."""
    batches, groups, _ = map(np.array, samples)
    effects = []
    for batch in set(batches.tolist()):
        members = groups[batches == batch]
        pairs = sum(first == second for first in members for second in members) - len(members)
        effects.append(1 + 0.3 * pairs / len(members))
    assert predicted_design_effect(batches, groups, 0.3) == pytest.approx(np.mean(effects))


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_within_a_minibatch_does_not_matter(samples, random) -> None:
    """Neither for the gradient, nor for the figures of minibatches."""
    columns = list(zip(*samples, strict=True))
    random.shuffle(columns)
    values = []
    for batches, groups, scalars in (samples, tuple(zip(*columns, strict=True))):
        batch, group, scalar = np.array(batches), np.array(groups), np.array(scalars)
        found = [effective_number(batch, group), predicted_design_effect(batch, group, 0.5)]
        if len(set(batches)) > 1:
            found += [design_effect(batch, scalar), autocorrelation(batch, scalar, 1)]
        values.append(found)
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6, atol=1e-9)


def test_the_design_effect_of_permutations_is_one_in_the_mean() -> None:
    """Over all uniform orders exactly 1, also for minibatches of unlike sizes."""
    batches = np.array([0] * 3 + [1] * 9 + [2] * 5 + [3] * 13)
    values = np.random.default_rng(0).exponential(size=30)
    effects = [design_effect(batches, values[shuffled_order(30, seed)]) for seed in range(4000)]
    deviation = np.std(effects) / np.sqrt(len(effects))
    assert np.mean(effects) == pytest.approx(1, abs=4 * deviation)
    assert deviation < 0.02


def test_a_design_effect_is_a_ratio_of_variances() -> None:
    """b times the variance of the means of equal minibatches, over that of the samples."""
    values = np.random.default_rng(1).normal(size=600)
    means = values.reshape(50, 12).mean(axis=1)
    expected = 12 * means.var(ddof=1) / values.var(ddof=1)
    assert design_effect(batches_of(600, 12), values) == pytest.approx(expected)


def test_files_read_one_after_another_do_not_mix() -> None:
    """Whole minibatches of one file: one effective file, the variance of clusters (Kish)."""
    files, batches = np.repeat(np.arange(10), 512), batches_of(5120, 512)
    assert effective_number(batches, files) == 1
    assert predicted_design_effect(batches, files, 0.1) == pytest.approx(1 + 511 * 0.1)


def test_unequal_files_count_by_their_share() -> None:
    """In a uniform order 1 / sum of squared shares: equal files count each, a giant alone."""
    assert expected_effective_number(np.full(7, 3)) == pytest.approx(7)
    sizes = np.array([1000, 10, 200, 40])
    files = np.repeat(np.arange(4), sizes)[shuffled_order(1250, 5)]
    found = effective_number(batches_of(1250, 125), files)
    assert found == pytest.approx(expected_effective_number(sizes), rel=0.05)


@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.6])
def test_the_correlation_within_files_is_recovered(correlation: float) -> None:
    """File effects of known variance in files of unlike sizes."""
    generator = np.random.default_rng(3)
    files = np.repeat(np.arange(400), generator.integers(20, 80, 400))
    effects = generator.normal(size=400)[files] * np.sqrt(correlation)
    values = effects + generator.normal(size=len(files)) * np.sqrt(1 - correlation)
    assert intra_group_correlation(files, values) == pytest.approx(correlation, abs=0.05)


def test_the_correlation_of_two_a_group_is_fishers() -> None:
    """With groups of two it is Fisher's intraclass correlation, from pair sums and differences."""
    pairs = np.random.default_rng(4).normal(size=(50, 2)) + np.arange(50)[:, None] / 10
    within = ((pairs[:, 0] - pairs[:, 1]) ** 2).sum() / 2 / 50
    between = 2 * pairs.mean(axis=1).var(ddof=1)
    expected = (between - within) / (between + within)
    found = intra_group_correlation(np.repeat(np.arange(50), 2), pairs.ravel())
    assert found == pytest.approx(expected)


def test_correlation_needs_several_files_with_several_samples() -> None:
    """One file, a file for each sample, and equal values: not a number."""
    values = np.arange(4.0)
    assert np.isnan(intra_group_correlation(np.zeros(4, np.int64), values))
    assert np.isnan(intra_group_correlation(np.arange(4), values))
    assert np.isnan(intra_group_correlation(np.array([0, 0, 1, 1]), np.ones(4)))
    assert np.isnan(design_effect(np.array([0, 0, 1, 1]), np.ones(4)))


def test_autocorrelation_compares_numbers_that_lie_apart() -> None:
    """A wave of period 4: -1 at lag 2, 1 at lag 4; across a gap in the numbers nothing is."""
    numbers = np.arange(400)
    wave = np.cos(np.pi * numbers / 2)
    assert autocorrelation(numbers, wave, 2) == pytest.approx(-1)
    assert autocorrelation(numbers, wave, 4) == pytest.approx(1)
    assert np.isnan(autocorrelation(numbers, wave, 400))
    gaps = numbers + 100 * (numbers // 4)  # each period stands alone
    assert autocorrelation(gaps, wave, 2) == pytest.approx(-1)
    assert np.isnan(autocorrelation(gaps, wave, 4))


def test_displacement_is_zero_unmoved_and_one_uniform() -> None:
    """Whatever the positions' unit; a reversed order has displacement 1.5."""
    positions = 10 * np.arange(100_000)
    assert rank_displacement(positions) == (0, 0)
    assert rank_displacement(positions[shuffled_order(100_000, 0)]) == pytest.approx(
        (1, 1), rel=0.01
    )
    assert rank_displacement(positions[::-1].copy())[0] == pytest.approx(1.5, rel=1e-3)


def read_by(num_readers: int, files_each: int) -> np.ndarray:
    """The file of each sample: readers in turn, each mixing `files_each` of its files at a time."""
    files = shuffled_order(NUM_FILES, 1).reshape(-1, num_readers * files_each)
    pools = np.repeat(files, FILE_SAMPLES, axis=1).reshape(
        -1, num_readers, files_each * FILE_SAMPLES
    )
    mixed = np.random.default_rng(2).permuted(pools, axis=2)
    return mixed.transpose(0, 2, 1).ravel()


@pytest.mark.parametrize(
    ("num_readers", "files_each", "num_files", "effect"),
    [
        (1, 1, 1.5, 35.0),
        (8, 1, 8.4, 7.1),
        (64, 1, 73, 1.7),
        (64, 8, 570, 1.09),
        (1, 2048, 2044, 1.025),
    ],
)
def test_the_designs_readers_are_reproduced(
    num_readers: int, files_each: int, num_files: float, effect: float
) -> None:
    """A million samples of 2048 files, correlation 0.1: few readers of one file mix badly.

    The measured variance of minibatch means agrees with the prediction from colliding pairs, as
    far as the few independent sets of files that a sub-epoch reads allow.
    """
    files = read_by(num_readers, files_each)
    batches = batches_of(len(files), BATCH_SIZE)
    generator = np.random.default_rng(0)
    values = np.sqrt(CORRELATION) * generator.normal(size=NUM_FILES)[files]
    values += np.sqrt(1 - CORRELATION) * generator.normal(size=len(files))
    predicted = predicted_design_effect(batches, files, intra_group_correlation(files, values))
    assert effective_number(batches, files) == pytest.approx(num_files, rel=0.03)
    assert predicted == pytest.approx(effect, rel=0.05)
    num_sets = NUM_FILES / num_readers / files_each
    noise = (predicted - 1) * np.sqrt(2 / num_sets) + np.sqrt(2 / len(np.unique(batches)))
    assert design_effect(batches, values) == pytest.approx(predicted, abs=3 * noise)


NUM_SAMPLES, CERTIFIED_BATCH = 4000, 40


def samples_of(order: np.ndarray) -> Samples:
    """Forty files of five speakers; a quarter of the variance is the file's."""
    generator = np.random.default_rng(1)
    files, speakers = np.arange(NUM_SAMPLES) // 100, np.arange(NUM_SAMPLES) // 20
    values = generator.normal(size=40)[files] * 0.5 + generator.normal(size=NUM_SAMPLES) * 0.75**0.5
    batches = np.arange(NUM_SAMPLES) // CERTIFIED_BATCH
    return Samples(batches, files[order], speakers[order], 7 * order, values[order])


def test_a_uniform_order_is_certified_uniform() -> None:
    """Each figure lies near the mean of uniform orders, about 40 files and 200 speakers."""
    found = certify(samples_of(shuffled_order(NUM_SAMPLES, 99)), seed=0)
    for name, figure in found.items():
        margin = 3 * (figure.uniform_high - figure.uniform_low)
        assert abs(figure.measured - figure.uniform) <= margin, name
    assert found["effective_files"].uniform == pytest.approx(40, rel=0.05)
    assert found["effective_speakers"].uniform == pytest.approx(200, rel=0.1)
    assert found["design_effect"].uniform == pytest.approx(1, abs=0.15)
    assert found["mean_displacement"].uniform == pytest.approx(1, abs=0.03)


def test_the_source_order_is_certified_as_what_it_is() -> None:
    """One or two files a minibatch, gradients ten times as noisy, neighbours alike, unmoved."""
    found = certify(samples_of(np.arange(NUM_SAMPLES)), seed=0)
    assert found["effective_files"].measured < 2
    assert found["effective_speakers"].measured < 4
    assert found["design_effect"].measured > 6
    expected = found["predicted_design_effect"].measured
    assert found["design_effect"].measured == pytest.approx(expected, rel=0.35)
    assert found["autocorrelation_1"].measured > 0.4
    assert found["autocorrelation_1"].uniform_high < 0.35
    assert found["mean_displacement"].measured == found["median_displacement"].measured == 0


@given(st.integers(0, 1000))
def test_uniform_orders_keep_the_samples_and_the_minibatches(seed: int) -> None:
    """Only who stands where changes, in all columns alike."""
    samples = samples_of(np.arange(NUM_SAMPLES))
    mixed = samples.in_uniform_order(seed)
    np.testing.assert_array_equal(mixed.batches, samples.batches)
    back = np.argsort(mixed.positions)
    for name in ("files", "speakers", "positions", "values"):
        np.testing.assert_array_equal(getattr(mixed, name)[back], getattr(samples, name))


def test_the_seed_decides() -> None:
    """The same certificate again, another with another seed."""
    samples = samples_of(shuffled_order(NUM_SAMPLES, 3))
    assert certify(samples, 1) == certify(samples, 1)
    assert certify(samples, 1) != certify(samples, 2)


def test_minibatches_may_be_divided_otherwise() -> None:
    """Figures that do not depend on minibatches stay the same."""
    samples = samples_of(shuffled_order(NUM_SAMPLES, 3))
    halves = figures(replace(samples, batches=np.arange(NUM_SAMPLES) // 20))
    whole = figures(samples)
    assert halves["mean_displacement"] == whole["mean_displacement"]
    assert halves["predicted_design_effect"] < whole["predicted_design_effect"]


def test_too_few_minibatches_or_samples_are_named() -> None:
    """One minibatch has no variance between minibatches."""
    one = np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="3 samples in one minibatch: need at least 2"):
        Samples(one, one, one, one, one.astype(np.float64))
