"""Fit the cost model's two free numbers to the papers' speed-ups in frames a second.

The rows are those of 000 Tables 1 and 2 and of 003 Table I, by hardware. The fit is least squares
of the logarithms of speed-ups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.optimize import least_squares

from training.cost_model.step_time import CostModel, Fitted, ScalingCalibration, ScalingWorkload

TrainerName = Literal["gtc", "bmuf", "htm"]

MAX_FITTED_RANKS = 64
GROUP_SIZE = 8
"""HTM's group size in all of Tables 1 and 2: the GPUs of one host."""

WORKLOAD = ScalingWorkload(num_parameters=24_000_000, minibatch_frames=2048, density=1e-3)
"""The papers' model (000 3.2). Its density is assumed; the papers say only that GTC is "typically
reducing the gradient size by several orders of magnitude" (003 VI-A)."""


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """SpeedUp is one row of a table: frames a second relative to one GPU; GTC has no blocks."""

    trainer: TrainerName
    num_ranks: int
    block_size: int | None
    speed_up: float

    def predicted_by(self, model: CostModel) -> float:
        """Return the model's speed-up for this row."""
        if self.trainer == "gtc":
            seconds = model.gtc(self.num_ranks)
        elif self.trainer == "bmuf":
            assert self.block_size is not None
            seconds = model.bmuf(self.num_ranks, self.block_size)
        else:
            assert self.block_size is not None
            seconds = model.htm(self.num_ranks, GROUP_SIZE, self.block_size)
        return model.speed_up(self.num_ranks, seconds)


V100 = (
    SpeedUp("gtc", 16, None, 12.5),
    SpeedUp("gtc", 32, None, 23.5),
    SpeedUp("gtc", 64, None, 21.7),
    SpeedUp("gtc", 128, None, 10.9),
    SpeedUp("bmuf", 16, 50, 15.7),
    SpeedUp("bmuf", 32, 50, 28.1),
    SpeedUp("bmuf", 64, 50, 58.2),
    SpeedUp("bmuf", 128, 50, 101.5),
    SpeedUp("htm", 16, 50, 13.9),
    SpeedUp("htm", 32, 50, 24.2),
    SpeedUp("htm", 64, 50, 49.2),
    SpeedUp("htm", 128, 50, 97.8),
    SpeedUp("bmuf", 128, 25, 91.3),
    SpeedUp("bmuf", 128, 100, 106.5),
    SpeedUp("bmuf", 128, 200, 110.3),
    SpeedUp("htm", 128, 25, 77.9),
    SpeedUp("htm", 128, 100, 99.6),
    SpeedUp("htm", 128, 200, 105.5),
)
"""Paper 000, Tables 1 and 2: p3.16xlarge, 8 V100 a host."""

K80 = (
    SpeedUp("gtc", 8, None, 7.01),
    SpeedUp("gtc", 16, None, 12.53),
    SpeedUp("gtc", 32, None, 21.75),
    SpeedUp("gtc", 64, None, 16.76),
    SpeedUp("bmuf", 8, 100, 7.18),
    SpeedUp("bmuf", 16, 100, 13.34),
    SpeedUp("bmuf", 32, 100, 25.46),
    SpeedUp("bmuf", 64, 100, 50.91),
    SpeedUp("bmuf", 128, 100, 97.59),
)
"""Paper 003, Table I: p2.16xlarge, 16 K80 a host."""


def fitted_rows(rows: Sequence[SpeedUp]) -> list[SpeedUp]:
    """Return the rows on which the parameters are fitted."""
    return [row for row in rows if row.num_ranks <= MAX_FITTED_RANKS]


def held_out_rows(rows: Sequence[SpeedUp]) -> list[SpeedUp]:
    """Return the rows that are only predicted."""
    return [row for row in rows if row.num_ranks > MAX_FITTED_RANKS]


START = np.log([0.03, 0.01])


def fit_speed_ups(
    rows: Sequence[SpeedUp], workload: ScalingWorkload, calibration: ScalingCalibration
) -> Fitted:
    """Return the `waiting` and `congestion` that fit the rows best, all else as calibrated."""

    def errors(logarithms: Float[np.ndarray, "2"]) -> Float[np.ndarray, " rows"]:
        waiting, congestion = np.exp(logarithms)
        fitted = Fitted(float(waiting), float(congestion))
        return relative_errors(rows, workload, replace(calibration, fitted=fitted))

    # No speed-up shows the difference between the lower bound and 0.
    found = least_squares(errors, START, bounds=(np.log(1e-9), np.log(10.0)))
    waiting, congestion = np.exp(found.x)
    return Fitted(waiting=float(waiting), congestion=float(congestion))


def relative_errors(
    rows: Sequence[SpeedUp], workload: ScalingWorkload, calibration: ScalingCalibration
) -> Float[np.ndarray, " rows"]:
    """Return the natural logarithms of predicted over published speed-ups."""
    model = CostModel(workload, calibration)
    return np.log([row.predicted_by(model) / row.speed_up for row in rows])
