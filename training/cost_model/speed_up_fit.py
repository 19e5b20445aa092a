"""Fit the cost model's two free numbers by least squares of the logarithms of speed-ups."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from scipy.optimize import least_squares

from training.cost_model.calibration import Calibration, Fitted
from training.cost_model.published_speed_ups import SpeedUp
from training.cost_model.step_time import CostModel, Workload

START = np.log([0.03, 0.01])


def fit_speed_ups(rows: Sequence[SpeedUp], workload: Workload, calibration: Calibration) -> Fitted:
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
    rows: Sequence[SpeedUp], workload: Workload, calibration: Calibration
) -> Float[np.ndarray, " rows"]:
    """Return the natural logarithms of predicted over published speed-ups."""
    model = CostModel(workload, calibration)
    return np.log([row.predicted_by(model) / row.speed_up for row in rows])
