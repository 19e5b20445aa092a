"""Collect sufficient statistics of diagonal Gaussians: counts, sums and sums of squares."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int, Int32

from training.decoding.alignment import PhoneAlignment

VARIANCE_FLOOR = 0.01  # of cepstra with variance 1


@dataclass(frozen=True)
class GaussianStatistics:
    """GaussianStatistics holds the statistics of several sets of frames, one row for each set."""

    counts: Float64[np.ndarray, " sets"]
    sums: Float64[np.ndarray, "sets dimension"]
    squares: Float64[np.ndarray, "sets dimension"]

    def __len__(self) -> int:
        return len(self.counts)

    def select(
        self, rows: Int[np.ndarray, " chosen"] | Bool[np.ndarray, " sets"]
    ) -> "GaussianStatistics":
        """Return the statistics of some of the sets."""
        return GaussianStatistics(self.counts[rows], self.sums[rows], self.squares[rows])

    def pool(self, weights: Float[np.ndarray, "pooled sets"]) -> "GaussianStatistics":
        """Merge sets: row i of `weights` is 1 for the sets of merged set i, else 0."""
        return GaussianStatistics(
            weights @ self.counts, weights @ self.sums, weights @ self.squares
        )

    def log_likelihoods(self) -> Float64[np.ndarray, " sets"]:
        """Return each set's log-likelihood under its own Gaussian, without terms in counts alone.

        That is -n/2 sum_d (log var_d + 1) for n frames.
        """
        counts = np.maximum(self.counts, 1e-9)[:, np.newaxis]
        variances = self.squares / counts - (self.sums / counts) ** 2
        log_variances = np.log(np.maximum(variances, VARIANCE_FLOOR))
        totals: Float64[np.ndarray, " sets"] = (log_variances + 1).sum(axis=1)
        totals *= -0.5 * self.counts
        return totals


def triphone_statistics(
    cepstra: Mapping[str, Float32[np.ndarray, "frames dimension"]],
    alignments: Mapping[str, PhoneAlignment],
) -> tuple[Int32[np.ndarray, "sets 3"], GaussianStatistics]:
    """Collect the triphones that occur, sorted, and the statistics of their 10 ms frames."""
    if not alignments:
        raise ValueError("no alignments: need at least one utterance to grow a tree")
    names = sorted(alignments)
    segments = np.concatenate([alignments[name].triphones for name in names])
    sums, squares = (
        np.concatenate([_segment_sums(cepstra[name], alignments[name], power) for name in names])
        for power in (1, 2)
    )
    durations = np.concatenate([alignments[name].durations for name in names]).astype(np.float64)
    # Add up the segments of equal triphones.
    triphones, rows = np.unique(segments, axis=0, return_inverse=True)
    total = GaussianStatistics(
        np.bincount(rows, durations),
        _sum_rows(rows, sums, len(triphones)),
        _sum_rows(rows, squares, len(triphones)),
    )
    return triphones, total


def _segment_sums(
    frames: Float32[np.ndarray, "frames dimension"], alignment: PhoneAlignment, power: int
) -> Float64[np.ndarray, "segments dimension"]:
    return np.add.reduceat(frames.astype(np.float64) ** power, alignment.starts, axis=0)


def _sum_rows(
    rows: Int[np.ndarray, " segments"],
    values: Float64[np.ndarray, "segments dimension"],
    num_sets: int,
) -> Float64[np.ndarray, "sets dimension"]:
    total = np.zeros((num_sets, values.shape[1]))
    np.add.at(total, rows, values)
    return total
