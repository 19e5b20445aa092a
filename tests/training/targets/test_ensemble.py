"""The mean of several models' posteriors, against float64 that knows nothing of logarithms."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.kbest import KBest, retained_mass, select_kbest
from training.targets.teacher import log_mean_posteriors, relative_logits

ORDER_TOLERANCE = 1e-12
"""Of log posteriors in nats; stored logits of 11 bits differ by 5e-4 and more."""


def mean_of_softmax(members: list[np.ndarray]) -> np.ndarray:
    """The definition in plain float64, for logits that do not overflow."""
    weights = [np.exp(logits.astype(np.float64)) for logits in members]
    return np.mean([each / each.sum(axis=1, keepdims=True) for each in weights], axis=0)


def log_mean(members: list[np.ndarray]) -> np.ndarray:
    return log_mean_posteriors([torch.from_numpy(each) for each in members]).numpy()


def stored(members: list[np.ndarray], k: int = 10) -> KBest:
    """Return the k best that a server stores of an ensemble."""
    mean = log_mean_posteriors([torch.from_numpy(each) for each in members])
    return select_kbest(relative_logits(mean).numpy(), k)


def logits_of(seed: int, num_frames: int = 200, num_senones: int = 40) -> np.ndarray:
    shape = (num_frames, num_senones)
    return (4 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@settings(deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda number: arrays(np.float32, (number, 3, 6), elements=st.floats(-300, 300, width=32))
    )
)
def test_it_is_the_log_of_the_mean_posterior(members: np.ndarray) -> None:
    """Of any number of members; each frame's posteriors sum to one."""
    found = log_mean(list(members))
    assert found.dtype == np.float64
    np.testing.assert_allclose(
        np.exp(found), mean_of_softmax(list(members)), rtol=1e-9, atol=1e-300
    )
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, rtol=1e-12)


def test_logits_beyond_exp_are_no_infinity() -> None:
    """The mean is finite where exp overflows, and where one member alone gives a senone mass."""
    far = np.array([[1e4, 0, -1e4]], np.float32), np.array([[-1e4, 0, 1e4]], np.float32)
    np.testing.assert_allclose(log_mean([*far]), [[-np.log(2), -1e4, -np.log(2)]], rtol=1e-4)


def assert_one_rounding_apart(found: KBest, expected: KBest) -> None:
    """The same senones; logits and log Z of float16 that may be rounded to the other side."""
    np.testing.assert_array_equal(found.senones, expected.senones)
    for name in ("logits", "log_z"):
        one, other = (getattr(each, name).astype(np.float64) for each in (found, expected))
        np.testing.assert_allclose(one, other, rtol=2**-10, atol=2**-24)
        assert np.mean(one != other) < 1e-3


@pytest.mark.parametrize("number", [2, 3, 7])
def test_equal_members_are_one_model(number: int) -> None:
    """Its k best, its log Z and the mass that these retain."""
    logits = logits_of(0)
    alone = select_kbest(logits, 10)
    together = stored([logits] * number)
    assert_one_rounding_apart(together, alone)
    np.testing.assert_allclose(retained_mass(together), retained_mass(alone), rtol=1e-3)


def test_the_order_of_members_changes_nothing_that_is_stored() -> None:
    """Log posteriors differ by less than the tolerance, and the k best are the same bits."""
    members = [logits_of(seed) for seed in range(4)]
    first, expected = log_mean(members), stored(members)
    for order in permutations(members):
        np.testing.assert_allclose(log_mean([*order]), first, rtol=0, atol=ORDER_TOLERANCE)
        found = stored([*order])
        for name in ("senones", "logits", "log_z"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
