"""GTC's messages on a CPU beside the plain `r += g`, interleaved, on one core.

`python -m tests.benchmarks.gtc_encode [--elements N] [--rounds N] [--json]`. Gradients are the same
each step, and thresholds such that a steady share of the elements, the density, is sent.
"""

import argparse

import torch

from tests.benchmarks.gtc_task import DENSITIES, GtcTask
from tests.benchmarks.measure import Figure, interleaved, ratios, show
from training.algorithms.gradient_threshold import add_message
from training.algorithms.threshold_encoding import take_message


def figures(num_elements: int, num_rounds: int) -> list[Figure]:
    """Milliseconds of each, and encoding's speed as a share of `r += g`, at each density."""
    return [
        figure for density in DENSITIES for figure in _figures_at(num_elements, density, num_rounds)
    ]


def _figures_at(num_elements: int, density: float, num_rounds: int) -> list[Figure]:
    task = GtcTask.of(num_elements, density, torch.device("cpu"))
    plain, counts = task.residual.clone(), torch.zeros(num_elements, dtype=torch.int32)
    message = take_message(task.residual, task.gradients, task.gradient_threshold)
    seconds = interleaved(
        {
            "r += g": lambda: plain.add_(task.gradients),
            "encode": lambda: take_message(task.residual, task.gradients, task.gradient_threshold),
            "decode": lambda: add_message(counts, message),
        },
        num_rounds,
    )
    speeds = ratios(seconds["r += g"], seconds["encode"])
    return [
        *(
            Figure.of(f"density {density:g}: {name}", [1e3 * each for each in taken], "ms")
            for name, taken in seconds.items()
        ),
        Figure.of(f"density {density:g}: encode's speed", speeds, "of r += g"),
        Figure.of(f"density {density:g}: message", [4e-6 * len(message)], "MB"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = figures(arguments.elements, arguments.rounds)
    show(f"GTC messages of {arguments.elements:,} float32, one core", measured, arguments.json)
