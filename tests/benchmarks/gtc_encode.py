"""Time GTC's messages on a CPU beside the plain `r += g`, interleaved, on one core.

`python -m tests.benchmarks.gtc_encode [--elements N] [--rounds N] [--json]`. Gradients are the same
each step, and thresholds such that a steady share of the elements, the density, is sent. Both the
compiled loops and NumPy are timed; NumPy encodes where there is no C compiler.
"""

import argparse
from functools import partial

import torch

from tests.benchmarks.gtc_task import DENSITIES, GtcTask
from tests.benchmarks.measure import Figure, interleaved, ratios, show
from training.algorithms.gtc import encoding


def figures(num_elements: int, num_rounds: int) -> list[Figure]:
    """Return milliseconds of each, and encoding's speed relative to `r += g`, at each density."""
    return [
        figure for density in DENSITIES for figure in _figures_at(num_elements, density, num_rounds)
    ]


def _figures_at(num_elements: int, density: float, num_rounds: int) -> list[Figure]:
    task = GtcTask.of(num_elements, density, torch.device("cpu"))
    plain, counts = task.residual.clone(), torch.zeros(num_elements, dtype=torch.int32)
    step = task.residual, task.gradients, task.gradient_threshold
    message = encoding.take_message(*step)
    encoders = {"encode": encoding.compiled_take_message, "encode, NumPy": encoding.take_message}
    seconds = interleaved(
        {
            "r += g": lambda: plain.add_(task.gradients),
            **{name: partial(encode, *step) for name, encode in encoders.items()},
            "decode": lambda: encoding.compiled_add_message(counts, message),
            "decode, NumPy": lambda: encoding.add_message(counts, message),
        },
        num_rounds,
    )
    return [
        *(
            Figure.of(f"density {density:g}: {name}", [1e3 * each for each in taken], "ms")
            for name, taken in seconds.items()
        ),
        *(
            Figure.of(
                f"density {density:g}: {name}'s speed",
                ratios(seconds["r += g"], seconds[name]),
                "of r += g",
            )
            for name in encoders
        ),
        Figure.of(f"density {density:g}: message", [4e-6 * len(message)], "MB"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not encoding.is_compiled():
        parser.error("nothing is compiled: install a C compiler, and then this package again")
    torch.set_num_threads(1)
    measured = figures(arguments.elements, arguments.rounds)
    show(f"GTC messages of {arguments.elements:,} float32, one core", measured, arguments.json)
