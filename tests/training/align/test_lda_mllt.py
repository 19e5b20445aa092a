"""LDA and MLLT: against SciPy, and by the likelihoods that they are to raise."""

import numpy as np
import pytest
from scipy.linalg import eigh

from training.align.lda_mllt import (
    CONTEXT,
    DIMENSION,
    NUM_SPLICED,
    Scatter,
    estimate_lda_mllt,
    lda,
    mllt,
    scatter,
    spliced,
    tree_features,
)

NUM_CLASSES, DIMENSIONS, NUM_FRAMES = 7, 9, 6000


@pytest.fixture(scope="module")
def classes() -> Scatter:
    """Return classes of other means and of full covariances that are alike but not equal."""
    random = np.random.default_rng(2)
    shared = np.eye(DIMENSIONS) + 0.3 * random.normal(size=(DIMENSIONS, DIMENSIONS))
    scales = random.uniform(0.3, 2, size=(NUM_CLASSES, DIMENSIONS))
    means = 2 * random.normal(size=(NUM_CLASSES, DIMENSIONS))
    blocks = []
    for _ in range(3):
        labels = random.integers(0, NUM_CLASSES, NUM_FRAMES // 3)
        noise = random.normal(size=(len(labels), DIMENSIONS)) * scales[labels]
        blocks.append((means[labels] + noise @ shared, labels))
    return scatter(blocks, NUM_CLASSES, DIMENSIONS)


def moments(classes: Scatter) -> tuple[np.ndarray, np.ndarray]:
    """Return the covariance within classes and that between them."""
    shares = classes.counts / classes.counts.sum()
    within = sum(share * each for share, each in zip(shares, classes.covariances, strict=True))
    centred = classes.means - shares @ classes.means
    between = sum(share * np.outer(x, x) for share, x in zip(shares, centred, strict=True))
    return np.asarray(within), np.asarray(between)


def test_lda_solves_the_generalized_eigenproblem(classes: Scatter) -> None:
    """Its rows are SciPy's eigenvectors of the largest eigenvalues, best first, but for signs."""
    within, between = moments(classes)
    _, vectors = eigh(between, within)
    found = lda(classes, 4)
    expected = vectors[:, ::-1][:, :4].T
    signs = np.sign(np.sum(found * expected, axis=1, keepdims=True))
    np.testing.assert_allclose(found * signs, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found @ within @ found.T, np.eye(4), atol=1e-4)


def test_classes_differ_in_one_direction_less_than_they_are(classes: Scatter) -> None:
    """Seven classes give at most six rows, which hold all that lies between them."""
    found, (within, between) = lda(classes, DIMENSION), moments(classes)
    assert found.shape == (NUM_CLASSES - 1, DIMENSIONS)
    kept = np.trace(found @ between @ found.T)
    assert kept == pytest.approx(np.trace(np.linalg.solve(within, between)), rel=1e-4)


def log_likelihood(classes: Scatter, matrix: np.ndarray) -> float:
    """Return that of frames under diagonal Gaussians of the classes, in the space before."""
    variances = np.stack([np.diag(matrix @ each @ matrix.T) for each in classes.covariances])
    jacobian = np.linalg.slogdet(matrix)[1]
    by_class = jacobian - 0.5 * (np.log(2 * np.pi * variances) + 1).sum(axis=1)
    return float(classes.counts @ by_class)


def test_mllt_raises_the_likelihood_of_diagonal_gaussians(classes: Scatter) -> None:
    """Each iteration raises it; the end is above LDA alone, and below that of full covariances."""
    projected = classes.projected(lda(classes, 5))
    found = [log_likelihood(projected, mllt(projected, count)) for count in range(9)]
    assert min(np.diff(found)) > -1e-6
    assert found[-1] > found[0] + 100
    full = -0.5 * (np.linalg.slogdet(2 * np.pi * projected.covariances)[1] + 5)
    assert found[-1] < projected.counts @ full


def test_mllt_needs_frames_enough(classes: Scatter) -> None:
    """Where no class has enough for a covariance, nothing is turned."""
    few = Scatter(classes.counts / 100, classes.sums / 100, classes.products / 100)
    np.testing.assert_array_equal(mllt(few), np.eye(DIMENSIONS))


def test_frames_are_spliced_with_their_neighbours() -> None:
    """Columns are frame by frame from the earliest; the edges repeat."""
    cepstra = np.arange(20 * 39, dtype=np.float32).reshape(20, 39)
    found = spliced(cepstra)
    assert found.shape == (20, (2 * CONTEXT + 1) * NUM_SPLICED)
    static = cepstra[:, :NUM_SPLICED]
    np.testing.assert_array_equal(found[10], static[10 - CONTEXT : 11 + CONTEXT].ravel())
    np.testing.assert_array_equal(found[0].reshape(-1, NUM_SPLICED)[: CONTEXT + 1], static[[0] * 5])


def test_the_transform_separates_what_only_neighbours_tell_apart() -> None:
    """Classes whose frames are alike but follow other frames differ after the transform."""
    random = np.random.default_rng(5)
    labels = np.repeat(np.tile([0, 1, 2, 1], 60), 12)  # 1 after 0 and after 2 is another class
    ascending = np.repeat(np.tile([0, 1, 2, 3], 60), 12)
    cepstra = random.normal(size=(len(labels), 39)).astype(np.float32)
    cepstra[:, 0] += 4 * labels
    transform = estimate_lda_mllt([(cepstra, ascending)], 4)
    frames = tree_features(cepstra, transform)
    assert frames.shape == (len(labels), 3)
    assert frames.dtype == np.float32

    def distance(values: np.ndarray) -> float:
        one, other = values[ascending == 1], values[ascending == 3]
        pooled = (np.cov(one.T) + np.cov(other.T)) / 2
        apart = one.mean(axis=0) - other.mean(axis=0)
        return float(apart @ np.linalg.solve(pooled, apart))

    assert distance(frames) > 4 * distance(cepstra)
