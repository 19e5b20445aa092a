"""The certificate of a training order: how uniform it came out, beside uniform orders."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64

from pipeline.shuffle_quality.design_effect import (
    autocorrelation,
    design_effect,
    effective_number,
    intra_group_correlation,
    predicted_design_effect,
    rank_displacement,
)
from pipeline.shuffling import shuffled_order

LAGS = (1, 4, 16)
"""How many minibatches apart the means are that the autocorrelation compares."""

NUM_ORDERS = 10
"""So many uniform orders give the range of a figure: chance alone leaves it once in 5.5 times."""

Figures = dict[str, float]


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

    def in_batches(self, batches: Int64[np.ndarray, " samples"]) -> "Samples":
        """Divide the same order into other minibatches."""
        return replace(self, batches=batches)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a training order, and its mean and range over uniform orders."""

    measured: float
    uniform: float
    uniform_low: float
    uniform_high: float


def certify(samples: Samples, seed: int, num_orders: int = NUM_ORDERS) -> dict[str, Figure]:
    """Compute the figures of an order and of `num_orders` uniform orders of its samples."""
    measured = figures(samples)
    # Uniform orders of the same samples show the range that chance alone makes.
    uniform = [figures(samples.in_uniform_order(seed + number)) for number in range(num_orders)]
    return {
        name: Figure(
            value,
            float(np.mean([each[name] for each in uniform])),
            min(each[name] for each in uniform),
            max(each[name] for each in uniform),
        )
        for name, value in measured.items()
    }


def figures(samples: Samples) -> Figures:
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
