"""Time functions by turns, so that a busy machine slows all sides alike; show the spread."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """Figure holds the median of several values of one quantity, and their range."""

    name: str
    median: float
    low: float
    high: float
    unit: str

    @classmethod
    def of(cls, name: str, values: Sequence[float], unit: str) -> "Figure":
        """Summarize `values`."""
        return cls(name, statistics.median(values), min(values), max(values), unit)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    num_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return each function's seconds in each round; every round runs all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(num_rounds):
        for name, function in functions.items():
            started = clock()
            function()
            seconds[name].append(clock() - started)
    return seconds


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the quotient of each round."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def show(title: str, figures: Sequence[Figure], as_json: bool) -> None:
    """Print the figures as one JSON object, or as lines of text."""
    if as_json:
        print(json.dumps({"title": title, "figures": [asdict(figure) for figure in figures]}))
        return
    print(title)
    for each in figures:
        print(f"  {each.name}: {each.median:.4g} ({each.low:.4g}..{each.high:.4g}) {each.unit}")
