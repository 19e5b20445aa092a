import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import logsumexp, softmax

from pipeline.kbest import KBest, check_kbest, retained_mass, select_kbest, soft_targets

TIED = st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-40, 0.5, 2.0])
LOGITS = arrays(
    np.float32,
    st.tuples(st.integers(0, 6), st.integers(1, 12)),
    elements=st.one_of(TIED, st.floats(-30, 30, width=32)),
)


def random_logits(num_frames: int = 40, num_senones: int = 300) -> np.ndarray:
    generator = np.random.default_rng(1)
    return (generator.standard_normal((num_frames, num_senones)) * 4).astype(np.float32)


@given(LOGITS, st.data())
def test_the_k_best_are_those_of_a_stable_sort(logits: np.ndarray, data: st.DataObject) -> None:
    """Falling logits, ties by lower senone id, at the k-th place too."""
    k = data.draw(st.integers(1, logits.shape[1]))
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert select_kbest(logits, k).senones.tolist() == expected.tolist()


def test_logits_are_relative_to_the_best() -> None:
    """The best is exactly 0, the others are within float16 of the difference."""
    logits = random_logits()
    kbest = select_kbest(logits, 20)
    difference = -np.sort(-logits, axis=1)[:, :20] - logits.max(axis=1, keepdims=True)
    assert (kbest.logits[:, 0] == 0).all()
    np.testing.assert_allclose(kbest.logits, difference, rtol=2**-11)


def test_log_z_is_that_of_all_senones() -> None:
    """log Z counts the senones that are not kept."""
    logits = random_logits()
    expected = logsumexp(logits.astype(np.float64), axis=1) - logits.max(axis=1)
    np.testing.assert_allclose(select_kbest(logits, 3).log_z, expected, rtol=2**-10)


@pytest.mark.parametrize("k", [1, 5, 20, 300])
def test_retained_mass_is_the_posterior_of_the_kept(k: int) -> None:
    """The mass equals the k largest posteriors within float16's rounding of log Z."""
    logits = random_logits()
    posteriors = -np.sort(-softmax(logits.astype(np.float64), axis=1), axis=1)
    mass = retained_mass(select_kbest(logits, k))
    np.testing.assert_allclose(mass, posteriors[:, :k].sum(axis=1), rtol=4e-3)
    assert (mass <= 1).all()


def test_soft_targets_are_the_renormalized_posteriors() -> None:
    """Missing logits at minus infinity: a softmax over the kept ones."""
    logits = random_logits()
    kbest = select_kbest(logits, 20)
    dense = np.full(logits.shape, -np.inf)
    kept = np.take_along_axis(logits, kbest.senones.astype(np.int64), axis=1)
    np.put_along_axis(dense, kbest.senones.astype(np.int64), kept, axis=1)
    expected = np.take_along_axis(softmax(dense, axis=1), kbest.senones.astype(np.int64), axis=1)
    targets = soft_targets(kbest)
    np.testing.assert_allclose(targets, expected, atol=1e-3)
    np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-6)


def test_a_hopeless_senone_stays_finite() -> None:
    """A difference beyond float16 is stored as its most negative number: probability 0."""
    kbest = select_kbest(np.array([[0.0, -1e6]], dtype=np.float32), 2)
    assert np.isfinite(kbest.logits).all()
    assert soft_targets(kbest).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("logits", "k", "message"),
    [
        (np.zeros((2, 12), np.float32), 0, r"k = 0: need 1\.\.12"),
        (np.zeros((2, 12), np.float32), 13, r"k = 13: need 1\.\.12"),
        (np.array([[0.0, np.nan]], np.float32), 1, "diverged"),
        (np.zeros((1, 65537), np.float32), 1, "65537 senones"),
    ],
)
def test_logits_without_k_best_are_refused(logits: np.ndarray, k: int, message: str) -> None:
    """The error names k and the bound, a teacher that diverged, or ids beyond 16 bits."""
    with pytest.raises(ValueError, match=message):
        select_kbest(logits, k)


@pytest.mark.parametrize(
    ("logits", "log_z"),
    [
        ([[-1.0, -2.0]], [1.0]),
        ([[0.0, 1.0]], [1.0]),
        ([[0.0, -np.inf]], [1.0]),
        ([[0.0, np.nan]], [1.0]),
        ([[0.0, -1.0]], [-1.0]),
        ([[0.0, -1.0]], [np.nan]),
    ],
)
def test_lying_targets_are_refused(logits: list[list[float]], log_z: list[float]) -> None:
    """Targets that select_kbest cannot have written are not trained on."""
    kbest = KBest(
        np.zeros((1, 2), np.uint16), np.array(logits, np.float16), np.array(log_z, np.float16)
    )
    with pytest.raises(ValueError, match="utterance u1"):
        check_kbest(kbest, "utterance u1")


@given(LOGITS)
def test_what_is_selected_passes_the_check(logits: np.ndarray) -> None:
    """The writer's own output is never refused."""
    check_kbest(select_kbest(logits, logits.shape[1]), "test")
