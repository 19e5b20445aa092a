"""Figures of how near minibatches are to uniform samples (the shuffle of 003 IV-A2).

A minibatch of b samples, two of which share a file with chance lambda, holds 1 / lambda effective
files, and its mean has 1 + (b - 1) lambda rho times the variance of b independent samples' mean
(Kish's design effect), where rho is the correlation within a file.
"""

import numpy as np
from jaxtyping import Float64, Int64


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
