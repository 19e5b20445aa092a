"""Train diagonal Gaussian mixtures of HMM states on frames whose state is known."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64

VARIANCE_FLOOR = 0.01  # of cepstra with variance 1
SPLIT_DISTANCE = 0.2  # standard deviations, as HTK's
MIN_FRAMES = 2.0  # a Gaussian with fewer keeps its mean and variance


@dataclass(frozen=True)
class Mixture:
    """Mixture holds one state's Gaussians."""

    weights: Float64[np.ndarray, " gaussians"]
    means: Float64[np.ndarray, "gaussians dimension"]
    variances: Float64[np.ndarray, "gaussians dimension"]

    @classmethod
    def standard(cls, dimension: int) -> "Mixture":
        """Return one Gaussian of mean 0 and variance 1."""
        return cls(np.ones(1), np.zeros((1, dimension)), np.ones((1, dimension)))

    def split(self, num_gaussians: int) -> "Mixture":
        """Split the heaviest Gaussians, one after the other, until there are `num_gaussians`."""
        mixture = self
        while len(mixture.weights) < num_gaussians:
            mixture = mixture._split_heaviest()
        return mixture

    def _split_heaviest(self) -> "Mixture":
        heaviest = int(np.argmax(self.weights))
        shift = SPLIT_DISTANCE * np.sqrt(self.variances[heaviest])
        weights = np.append(self.weights, self.weights[heaviest] / 2)
        weights[heaviest] /= 2
        means = np.vstack([self.means, self.means[heaviest] + shift])
        means[heaviest] -= shift
        return Mixture(weights, means, np.vstack([self.variances, self.variances[heaviest]]))

    def reestimate(self, frames: Float32[np.ndarray, "frames dimension"]) -> "Mixture":
        """Take one step of expectation maximization; a Gaussian with too few frames is kept."""
        # Expectation: the posterior of each Gaussian for each frame.
        joint = _log_densities(frames, self)
        joint -= joint.max(axis=0)
        posteriors = np.exp(joint)
        posteriors /= posteriors.sum(axis=0)
        # Maximization: weighted counts, means and variances.
        counts = posteriors.sum(axis=1, dtype=np.float64)
        divisor = np.maximum(counts, 1e-9)[:, np.newaxis]
        means = (posteriors @ frames) / divisor
        variances = (posteriors @ frames**2) / divisor - means**2
        usable = (counts >= MIN_FRAMES)[:, np.newaxis]
        weights = np.maximum(counts, 1.0)
        return Mixture(
            weights / weights.sum(),
            np.where(usable, means, self.means),
            np.where(usable, np.maximum(variances, VARIANCE_FLOOR), self.variances),
        )


def _log_densities(
    frames: Float32[np.ndarray, "frames dimension"], mixture: Mixture
) -> Float32[np.ndarray, "gaussians frames"]:
    """Return log(weight x density) of each Gaussian for each frame."""
    precisions = 1 / mixture.variances
    constants = np.log(mixture.weights) - 0.5 * (
        np.log(2 * np.pi * mixture.variances) + mixture.means**2 * precisions
    ).sum(axis=1)
    linear = (mixture.means * precisions).astype(np.float32)
    quadratic = (-0.5 * precisions).astype(np.float32)
    scores: Float32[np.ndarray, "gaussians frames"] = linear @ frames.T + quadratic @ frames.T**2
    scores += constants.astype(np.float32)[:, np.newaxis]
    return scores


def log_likelihoods(
    frames: Float32[np.ndarray, "frames dimension"], mixtures: list[Mixture]
) -> Float32[np.ndarray, "frames states"]:
    """Return the log-likelihood of every frame in every state."""
    joined = Mixture(
        np.concatenate([mixture.weights for mixture in mixtures]),
        np.concatenate([mixture.means for mixture in mixtures]),
        np.concatenate([mixture.variances for mixture in mixtures]),
    )
    sizes = [len(mixture.weights) for mixture in mixtures]
    first = np.cumsum([0, *sizes[:-1]])
    joint = _log_densities(frames, joined)
    # Gaussians are rows, so that the sums over a state's rows are contiguous.
    largest = np.maximum.reduceat(joint, first, axis=0)
    joint -= np.repeat(largest, sizes, axis=0)
    np.exp(joint, out=joint)
    totals = largest + np.log(np.add.reduceat(joint, first, axis=0))
    return np.ascontiguousarray(totals.T)
