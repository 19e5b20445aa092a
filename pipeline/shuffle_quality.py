"""Measure how close a training order is to a uniform one (the shuffle of paper 003 IV-A2).

A minibatch of b samples, two of which share a file with chance lambda, holds 1 / lambda effective
files, and its mean has 1 + (b - 1) lambda rho times the variance of b independent samples' mean
(Kish's design effect), where rho is the correlation within a file. The certificate of an order
states its figures beside those of uniform orders.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from pipeline.shuffling import shuffled_order


def effective_number(
    batches: Int64[np.ndarray, " samples"], groups: Int64[np.ndarray, " samples"]
) -> float:
    """Invert the chance that two samples of a minibatch share a group; infinite if none do."""
    sizes = np.unique(batches, return_counts=True)[1]
    shared = int(_shared_pairs(batches, groups).sum())
    return int((sizes * (sizes - 1)).sum()) / shared if shared else float("inf")


def expected_effective_number(sizes: Int64[np.ndarray, " groups"]) -> float:
    """Compute the effective number in a uniform order of groups that hold `sizes`, of any unit."""
    shares = sizes / sizes.sum()
    return float(1 / (shares**2).sum())


def _shared_pairs(
    batches: Int64[np.ndarray, " samples"], groups: Int64[np.ndarray, " samples"]
) -> Int64[np.ndarray, " batches"]:
    """Ordered pairs of different samples of one group, in each minibatch."""
    batch, group = (np.unique(each, return_inverse=True)[1] for each in (batches, groups))
    num_groups = int(group.max()) + 1
    cells, counts = np.unique(batch * num_groups + group, return_counts=True)
    pairs: Int64[np.ndarray, " batches"] = np.bincount(
        cells // num_groups, counts * (counts - 1)
    ).astype(np.int64)
    return pairs


def intra_group_correlation(
    groups: Int64[np.ndarray, " samples"], values: Float64[np.ndarray, " samples"]
) -> float:
    """Estimate the correlation of two values of one group by the analysis of variance."""
    group, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    num_samples, num_groups = len(values), len(sizes)
    if not 1 < num_groups < num_samples:
        return float("nan")
    means = np.bincount(group, values) / sizes
    between = (sizes * (means - values.mean()) ** 2).sum() / (num_groups - 1)
    within = ((values - means[group]) ** 2).sum() / (num_samples - num_groups)
    # Unequal groups enter as n_0 of the one-way analysis of variance.
    size = (num_samples - (sizes.astype(np.float64) ** 2).sum() / num_samples) / (num_groups - 1)
    total = between + (size - 1) * within
    return float((between - within) / total) if total > 0 else float("nan")


def design_effect(
    batches: Int64[np.ndarray, " samples"], values: Float64[np.ndarray, " samples"]
) -> float:
    """Divide the variance of minibatch means by that of independent samples; 1 if uniform."""
    _, means, sizes = _batch_means(batches, values)
    variance = values.var(ddof=1)
    # Weighted so, its expectation over all permutations is 1, whatever the minibatches' sizes.
    between = (sizes * (means - values.mean()) ** 2).sum() / (len(means) - 1)
    # At a design effect of 2 a gradient is as noisy as one of half the minibatch.
    return float(between / variance) if variance > 0 else float("nan")


def predicted_design_effect(
    batches: Int64[np.ndarray, " samples"],
    groups: Int64[np.ndarray, " samples"],
    correlation: float,
) -> float:
    """1 + (b - 1) lambda rho, the mean over minibatches (Kish)."""
    sizes = np.unique(batches, return_counts=True)[1]
    return 1 + correlation * float((_shared_pairs(batches, groups) / sizes).mean())


def autocorrelation(
    batches: Int64[np.ndarray, " samples"], values: Float64[np.ndarray, " samples"], lag: int
) -> float:
    """Correlate the means of minibatches whose numbers are `lag` apart; 0 if uniform."""
    numbers, means, _ = _batch_means(batches, values)
    # Numbers have gaps where sub-epochs or ranks end, and pairs across a gap do not count.
    later = np.minimum(np.searchsorted(numbers, numbers + lag), len(numbers) - 1)
    paired = numbers[later] == numbers + lag
    deviations = means - means.mean()
    variance = (deviations**2).mean()
    if not paired.any() or variance == 0:
        return float("nan")
    return float((deviations[paired] * deviations[later[paired]]).mean() / variance)


def _batch_means(
    batches: Int64[np.ndarray, " samples"], values: Float64[np.ndarray, " samples"]
) -> tuple[
    Int64[np.ndarray, " batches"], Float64[np.ndarray, " batches"], Int64[np.ndarray, " batches"]
]:
    numbers, batch, sizes = np.unique(batches, return_inverse=True, return_counts=True)
    return numbers, np.bincount(batch, values) / sizes, sizes


def rank_displacement(positions: Int64[np.ndarray, " samples"]) -> tuple[float, float]:
    """Mean and median distance of each sample's rank in the source to its rank in the order.

    In units of what a uniform order gives, n / 3 and n (1 - sqrt(1/2)): 0 unmoved, 1 uniform.
    """
    num_samples = len(positions)
    ranks = np.empty(num_samples, np.int64)
    ranks[np.argsort(positions, kind="stable")] = np.arange(num_samples)
    distances = np.abs(ranks - np.arange(num_samples))
    expected = (num_samples**2 - 1) / (3 * num_samples)
    median = num_samples * (1 - np.sqrt(0.5))
    return float(distances.mean() / expected), float(np.median(distances) / median)


LAGS = (1, 4, 16)
"""How many minibatches apart the means are that the autocorrelation compares."""

NUM_ORDERS = 10
"""So many uniform orders give the range of a figure: chance alone leaves it once in 5.5 times."""

FIGURE_TITLES = {
    "effective_files": "effective source files",
    "effective_speakers": "effective speakers",
    "design_effect": "design effect",
    "predicted_design_effect": "design effect, predicted",
    "autocorrelation_1": "autocorrelation, next minibatch",
    "autocorrelation_4": "autocorrelation, lag 4",
    "autocorrelation_16": "autocorrelation, lag 16",
    "mean_displacement": "mean displacement",
    "median_displacement": "median displacement",
}
"""What tables call the figures of an order."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples holds a reading order: each sample's minibatch, source file and speaker.

    Minibatches that follow each other have consecutive numbers; `positions` are places in the
    source before any shuffle; the means of `values` over a minibatch represent its gradient.
    """

    batches: Int64[np.ndarray, " samples"]
    files: Int64[np.ndarray, " samples"]
    speakers: Int64[np.ndarray, " samples"]
    positions: Int64[np.ndarray, " samples"]
    values: Float64[np.ndarray, " samples"]

    def __post_init__(self) -> None:
        columns = (self.batches, self.files, self.speakers, self.positions, self.values)
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"columns of {[len(column) for column in columns]} samples: need one")
        if len(np.unique(self.batches)) < 2:
            raise ValueError(f"{len(self.batches)} samples in one minibatch: need at least 2")

    def in_uniform_order(self, seed: int) -> "Samples":
        """Permute the samples over the same minibatches."""
        order = shuffled_order(len(self.batches), seed, "uniform order")
        return Samples(
            self.batches,
            self.files[order],
            self.speakers[order],
            self.positions[order],
            self.values[order],
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a training order, and its mean and range over uniform orders."""

    measured: float
    uniform: float
    uniform_low: float
    uniform_high: float


def certify(samples: Samples, seed: int) -> dict[str, Figure]:
    """Compute the figures of an order and of NUM_ORDERS uniform orders of its samples."""
    measured = figures(samples)
    # Uniform orders of the same samples show the range that chance alone makes.
    uniform = [figures(samples.in_uniform_order(seed + number)) for number in range(NUM_ORDERS)]
    return {
        name: Figure(
            value,
            float(np.mean([each[name] for each in uniform])),
            min(each[name] for each in uniform),
            max(each[name] for each in uniform),
        )
        for name, value in measured.items()
    }


def figures(samples: Samples) -> dict[str, float]:
    """Compute all figures of an order by name; NaN where there are too few minibatches."""
    batches, values = samples.batches, samples.values
    # rho is how alike a file's samples are; without it, sharing a file costs nothing.
    correlation = intra_group_correlation(samples.files, values)
    means = {f"autocorrelation_{lag}": autocorrelation(batches, values, lag) for lag in LAGS}
    displacement = rank_displacement(samples.positions)
    return {
        "effective_files": effective_number(batches, samples.files),
        "effective_speakers": effective_number(batches, samples.speakers),
        "design_effect": design_effect(batches, values),
        "predicted_design_effect": predicted_design_effect(batches, samples.files, correlation),
        **means,
        "mean_displacement": displacement[0],
        "median_displacement": displacement[1],
    }
