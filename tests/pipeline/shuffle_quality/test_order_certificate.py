"""The certificate: an order's figures beside those of uniform orders of the same samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shuffle_quality import Samples, certify, figures
from pipeline.shuffling import shuffled_order

NUM_SAMPLES, BATCH_SIZE = 4000, 40


def samples_of(order: np.ndarray) -> Samples:
    """Forty files of five speakers; a quarter of the variance is the file's."""
    generator = np.random.default_rng(1)
    files, speakers = np.arange(NUM_SAMPLES) // 100, np.arange(NUM_SAMPLES) // 20
    values = generator.normal(size=40)[files] * 0.5 + generator.normal(size=NUM_SAMPLES) * 0.75**0.5
    batches = np.arange(NUM_SAMPLES) // BATCH_SIZE
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
    halves = figures(samples.in_batches(np.arange(NUM_SAMPLES) // 20))
    whole = figures(samples)
    assert halves["mean_displacement"] == whole["mean_displacement"]
    assert halves["predicted_design_effect"] < whole["predicted_design_effect"]


def test_too_few_minibatches_or_samples_are_named() -> None:
    """One minibatch has no variance between minibatches."""
    one = np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="3 samples in one minibatch: need at least 2"):
        Samples(one, one, one, one, one.astype(np.float64))
