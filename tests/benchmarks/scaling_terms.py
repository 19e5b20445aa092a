"""Fit the terms that may explain the papers' speed-ups, and compare them.

`python -m tests.benchmarks.scaling_terms` fits each candidate on the rows of at most 64 ranks, for
V100s and K80s apart. The corrected Akaike criterion (lower is better) chooses. Held-out rows are
shown, but choose nothing.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log, log2
from typing import Literal

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import norm

from jobs.planning.scaling import read_scaling
from tests.benchmarks.measure import Figure, show
from training.cost_model.speed_up_fit import K80, V100, WORKLOAD, SpeedUp, fitted_rows
from training.cost_model.step_time import Calibration, CostModel, Fitted, Pattern, place_ranks

HARDWARE = {"scaling_v100": V100, "scaling_k80": K80}
GTC_128 = next(row for row in V100 if row.trainer == "gtc" and row.num_ranks == 128)


def no_waiting(_num_ranks: int) -> float:
    """Assume that ranks are all equally fast."""
    return 0.0


def slowest_of(num_ranks: int) -> float:
    """Return the mean of the largest of that many normal variates, by Blom's approximation."""
    return float(norm.ppf((num_ranks - 0.375) / (num_ranks + 0.25))) if num_ranks > 1 else 0.0


@dataclass(frozen=True)
class Candidate:
    """Candidate is a form of the fitted terms; a None exponent of congestion is fitted too."""

    name: str
    waiting: Callable[[int], float]
    second: Literal["nothing", "congestion", "density"]
    exponent: float | None = 1.0
    all_gather: Pattern = "direct"
    all_reduce: Pattern = "ring"

    @property
    def num_parameters(self) -> int:
        """Count the numbers fitted for both hardwares; an exponent is common to them."""
        each = (self.waiting is not no_waiting) + (self.second != "nothing")
        return 2 * each + (self.exponent is None)


CANDIDATES = (
    Candidate("nothing fitted", no_waiting, "nothing"),
    Candidate("waiting ~ log N", log2, "nothing"),
    Candidate("waiting ~ log N, density", log2, "density"),
    Candidate("congestion", no_waiting, "congestion"),
    Candidate("waiting ~ N, congestion", float, "congestion"),
    Candidate("waiting ~ log N, congestion: the model's", log2, "congestion"),
    Candidate("waiting ~ slowest of N normal, congestion", slowest_of, "congestion"),
    Candidate("waiting ~ log N, congestion to a fitted power", log2, "congestion", None),
    Candidate("the model's, all exchanges direct", log2, "congestion", all_reduce="direct"),
    Candidate("the model's, all exchanges in rings", log2, "congestion", all_gather="ring"),
)


def predicted(row: SpeedUp, calibration: Calibration, candidate: Candidate, x: np.ndarray) -> float:
    """Predict a row's speed-up with this candidate's terms in place of the model's own."""
    waiting, second, exponent = x
    connections = place_ranks(row.num_ranks, calibration.network).num_connections
    # The model's law is linear in the connections: another power is a rate of its own per row.
    rate = second * (connections - 1) ** (exponent - 1) if connections > 1 else 0.0
    congestion = rate if candidate.second == "congestion" else 0.0
    density = second if candidate.second == "density" else WORKLOAD.density
    network = replace(
        calibration.network, all_gather=candidate.all_gather, all_reduce=candidate.all_reduce
    )
    fitted = Fitted(waiting=0.0, congestion=congestion)
    model = CostModel(
        replace(WORKLOAD, density=min(density, 1.0)),
        replace(calibration, network=network, fitted=fitted),
    )
    # Waiting adds to a step's time, which is the ranks over the speed-up.
    time_ratio = row.num_ranks / row.predicted_by(model)
    return row.num_ranks / (time_ratio + waiting * candidate.waiting(row.num_ranks))


def fit(candidate: Candidate) -> tuple[float, list[float], float]:
    """Return the criterion, the errors of the fitted rows, and the speed-up of GTC on 128."""
    calibrations = {name: read_scaling(name) for name in HARDWARE}

    def predict(row: SpeedUp, name: str, x: np.ndarray) -> float:
        waiting, second = np.exp(x[:2] if name == "scaling_v100" else x[2:4])
        exponent = np.exp(x[4]) if candidate.exponent is None else candidate.exponent
        return predicted(row, calibrations[name], candidate, np.array([waiting, second, exponent]))

    def errors(x: np.ndarray) -> list[float]:
        return [
            log(predict(row, name, x) / row.speed_up)
            for name, rows in HARDWARE.items()
            for row in fitted_rows(rows)
        ]

    start = np.log([0.03, 0.02, 0.03, 0.02, 1.2])
    found = least_squares(errors, start, bounds=(np.log(1e-9), np.log(10.0)))
    num_rows, k = len(found.fun), candidate.num_parameters
    mean_square = float(np.mean(found.fun**2))
    criterion = num_rows * log(mean_square) + 2 * k + 2 * k * (k + 1) / (num_rows - k - 1)
    return criterion, list(found.fun), predict(GTC_128, "scaling_v100", found.x)


def main() -> None:
    """Fit and show all candidates, then each row beside the model's prediction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = []
    for candidate in CANDIDATES:
        criterion, errors, gtc_128 = fit(candidate)
        figures += [
            Figure.of(f"{candidate.name}: corrected Akaike criterion", [criterion], ""),
            Figure.of("  fitted rows, error", [100 * abs(each) for each in errors], "%"),
            Figure.of("  held out: GTC on 128 (published 10.9)", [gtc_128], "times"),
        ]
    for name, rows in HARDWARE.items():
        model = CostModel(WORKLOAD, read_scaling(name))
        figures += [
            Figure.of(
                f"{name}, {row.trainer} on {row.num_ranks}, block_size {row.block_size} "
                f"(published {row.speed_up})",
                [row.predicted_by(model)],
                "times",
            )
            for row in rows
        ]
    show("Fitted terms of the cost model", figures, arguments.json)


if __name__ == "__main__":
    main()
