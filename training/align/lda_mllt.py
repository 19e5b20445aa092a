"""LDA and MLLT of spliced cepstra, as features of the phonetic decision tree (paper 003 VII-C1).

Linear discriminant analysis keeps the directions in which classes differ most. The maximum
likelihood linear transform then turns these so that each class's covariance is nearly diagonal,
as diagonal Gaussians assume (M. J. F. Gales, Semi-tied covariance matrices, 1999). Classes are
the states of monophones. Both come from sums over frames alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from training.align.monophone_hmm import VARIANCE_FLOOR

NUM_SPLICED = 13
"""The static cepstra, which lie before their derivatives."""

CONTEXT = 4
"""Frames on each side that are spliced: their derivatives span as many."""

DIMENSION = 40
"""003 VII-C1."""

LDA_MLLT_STATISTIC = "lda_mllt"
"""The statistic of the bootstrap's manifest with the matrix, row by row, if there is one."""

NUM_MLLT_ITERATIONS = 10
MIN_CLASS_FRAMES = 200  # a class's covariance has 820 values; MLLT leaves smaller classes out
_RIDGE = 1e-6  # of the mean variance: constant coefficients leave no covariance singular


@dataclass(frozen=True)
class Scatter:
    """Scatter holds the frames of each class: how many, their sum, and their outer products' sum.

    A mean over no frames is 0.
    """

    counts: Float64[np.ndarray, " classes"]
    sums: Float64[np.ndarray, "classes dimension"]
    products: Float64[np.ndarray, "classes dimension dimension"]

    @property
    def means(self) -> Float64[np.ndarray, "classes dimension"]:
        """Return each class's mean."""
        means: Float64[np.ndarray, "classes dimension"]
        means = self.sums / np.maximum(self.counts, 1)[:, np.newaxis]
        return means

    @property
    def covariances(self) -> Float64[np.ndarray, "classes dimension dimension"]:
        """Return each class's covariance matrix."""
        counts = np.maximum(self.counts, 1)[:, np.newaxis, np.newaxis]
        covariances: Float64[np.ndarray, "classes dimension dimension"]
        covariances = self.products / counts
        covariances -= self.means[:, :, np.newaxis] * self.means[:, np.newaxis]
        return covariances

    def projected(self, matrix: Float64[np.ndarray, "rows dimension"]) -> "Scatter":
        """Return the scatter of the same frames, each multiplied by `matrix`."""
        return Scatter(self.counts, self.sums @ matrix.T, matrix @ self.products @ matrix.T)


def scatter(
    frames: Iterable[tuple[Float[np.ndarray, "_frames dimension"], Int64[np.ndarray, " _frames"]]],
    num_classes: int,
    dimension: int,
) -> Scatter:
    """Add up frames and their classes."""
    counts = np.zeros(num_classes)
    sums, products = (np.zeros((num_classes, *(dimension,) * power)) for power in (1, 2))
    for values, classes in frames:
        counts += np.bincount(classes, minlength=num_classes)
        for each in np.unique(classes):
            own = values[classes == each].astype(np.float64)
            sums[each] += own.sum(axis=0)
            products[each] += own.T @ own
    return Scatter(counts, sums, products)


def lda(classes: Scatter, dimension: int) -> Float64[np.ndarray, "rows dimension"]:
    """Return the directions of largest between-class variance where that within classes is 1.

    At most `dimension` rows, the best first; c classes differ in c - 1 directions.
    """
    shares = classes.counts / classes.counts.sum()
    within = np.tensordot(shares, classes.covariances, axes=1)
    within += _RIDGE * np.trace(within) / len(within) * np.eye(len(within))
    centred = classes.means - shares @ classes.means
    between = (shares * centred.T) @ centred
    # within = L L^T: whitened by L^-1, the between-class covariance has orthogonal axes.
    whitening = np.linalg.inv(np.linalg.cholesky(within))
    _, axes = np.linalg.eigh(whitening @ between @ whitening.T)
    num_rows = min(dimension, np.count_nonzero(classes.counts) - 1)
    directions: Float64[np.ndarray, "rows dimension"] = axes[:, ::-1][:, :num_rows].T @ whitening
    return directions


def mllt(
    classes: Scatter, num_iterations: int = NUM_MLLT_ITERATIONS
) -> Float64[np.ndarray, "dimension dimension"]:
    """Return the square matrix A that makes diagonal Gaussians of the classes most likely.

    Row by row, Gales's update maximizes sum_j n_j (log|det A| - 1/2 sum_i log a_i S_j a_i^T) for
    the covariances S_j of n_j frames.
    """
    enough = classes.counts >= MIN_CLASS_FRAMES
    counts, covariances = classes.counts[enough], classes.covariances[enough]
    matrix = np.eye(classes.sums.shape[1])
    if not enough.any():
        return matrix
    for _ in range(num_iterations):
        variances = np.einsum("rd,jde,re->rj", matrix, covariances, matrix)
        # Frames that are all equal, such as digital silence, have none.
        variances = np.maximum(variances, VARIANCE_FLOOR)
        # G_i = sum_j n_j / variance_ij S_j, with the variances of this iteration's beginning.
        weighted = np.tensordot(counts / variances, covariances, axes=1)
        for row, inverse in enumerate(map(np.linalg.inv, weighted)):
            # A column of A^-1 is the row's cofactors over det A, and their scale cancels.
            cofactors = np.linalg.inv(matrix)[:, row]
            direction = cofactors @ inverse
            matrix[row] = direction * np.sqrt(counts.sum() / (direction @ cofactors))
    return matrix


def tree_features(
    cepstra: Float32[np.ndarray, "frames 39"], lda_mllt: Float64[np.ndarray, "_rows 117"] | None
) -> Float32[np.ndarray, "frames _dimension"]:
    """Return what the tree is grown on: cepstra, or their transform where there is one."""
    return cepstra if lda_mllt is None else spliced(cepstra) @ lda_mllt.T.astype(np.float32)


def spliced(cepstra: Float32[np.ndarray, "frames 39"]) -> Float32[np.ndarray, "frames 117"]:
    """Join each frame's static cepstra with those around it; the edges repeat."""
    static = np.pad(cepstra[:, :NUM_SPLICED], ((CONTEXT, CONTEXT), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(static, 2 * CONTEXT + 1, axis=0)
    return np.ascontiguousarray(windows.transpose(0, 2, 1)).reshape(len(cepstra), -1)


def estimate_lda_mllt(
    utterances: Iterable[tuple[Float32[np.ndarray, "_frames 39"], Int64[np.ndarray, " _frames"]]],
    num_classes: int,
) -> Float64[np.ndarray, "_rows 117"]:
    """Estimate the transform of spliced cepstra from utterances and the class of each frame."""
    frames = ((spliced(cepstra), classes) for cepstra, classes in utterances)
    classes = scatter(frames, num_classes, NUM_SPLICED * (2 * CONTEXT + 1))
    discriminant = lda(classes, DIMENSION)
    transform: Float64[np.ndarray, "_rows 117"]
    transform = mllt(classes.projected(discriminant)) @ discriminant
    return transform
