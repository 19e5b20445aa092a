"""Lay out what the steps of a corpus took, and how it grows from one corpus to a larger one."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tests.benchmarks.corpus_scale.steps import KINDS, Measured

HEADER = (
    "| step | wall, s | CPU, s | us an utterance | peak MB: JVM, driver, worker, server "
    "| requests | an utterance | MB read, written |"
)
RULE = "| --- | --- | --- | --- | --- | --- | --- | --- |"
QUANTITIES = {"CPU, us": 1e6, "requests": 1.0, "bytes read": 1.0, "bytes written": 1.0}
BOUND = 1.1


def row(each: Measured, num_utterances: int) -> str:
    """Format one step as a line of the table."""
    cells = (
        each.step,
        f"{each.wall_s:.1f}",
        f"{each.cpu_in_all:.1f}",
        f"{1e6 * each.cpu_in_all / num_utterances:,.0f}",
        ", ".join(f"{each.peak_mb[kind]:.0f}" for kind in KINDS),
        f"{each.requests:,}",
        f"{each.requests / num_utterances:.4f}",
        f"{each.bytes_read / 1e6:.1f}, {each.bytes_written / 1e6:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def growth(runs: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a line for each step and quantity: what one more utterance costs between two corpora.

    A step's cost of starting is so left out. With three corpora the last column is the cost between
    the larger two over that between the smaller two, and what is above 1.1 is marked.
    """
    runs = sorted(runs, key=lambda run: run["utterances"])
    sizes = [run["utterances"] for run in runs]
    pairs = list(pairwise(sizes))
    between = " | ".join(f"{low:,} to {high:,}" for low, high in pairs)
    yield f"| step | of one more utterance | {between} | largest over smallest | peak MB |"
    yield f"| --- | --- |{' --- |' * len(pairs)} --- | --- |"
    for step in (each["step"] for each in runs[0]["steps"]):
        found = [next(each for each in run["steps"] if each["step"] == step) for run in runs]
        peaks = ", ".join(f"{sum(each['peak_mb'].values()):.0f}" for each in found)
        for name, factor in QUANTITIES.items():
            values = [factor * quantity(each, name) for each in found]
            rates = [
                (values[place + 1] - values[place]) / (high - low)
                for place, (low, high) in enumerate(pairs)
            ]
            yield f"| {' | '.join((step, name, *map(short, rates), compared(rates), peaks))} |"
            peaks = ""


def short(value: float) -> str:
    return f"{value:,.4g}"


def compared(rates: Sequence[float]) -> str:
    """Divide the last rate by the first."""
    if len(rates) < 2 or rates[0] <= 0:
        return "-"
    ratio = rates[-1] / rates[0]
    return f"**{ratio:.2f}**" if ratio > BOUND else f"{ratio:.2f}"


def quantity(step: Mapping[str, Any], name: str) -> float:
    if name == "CPU, us":
        return float(sum(step["cpu_s"].values()))
    return float(step[name.replace(" ", "_")])
