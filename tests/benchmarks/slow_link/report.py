"""Report which methods reached the target loss, how soon, and the bytes they sent."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.slow_link.hosts import Rates
from tests.benchmarks.slow_link.method import Settings
from tests.benchmarks.slow_link.rank import Point

COLUMNS = (
    "method",
    "learning rate",
    "further setting",
    "seconds",
    "steps",
    "ms a step",
    "MB between",
    "MB within",
)


@dataclass(frozen=True)
class Standing:
    """Standing holds a method's result: the last point of each seed's training."""

    method: str
    settings: Settings
    ends: Sequence[Point]
    target_loss: float

    @property
    def has_reached_target(self) -> bool:
        """Return whether every seed did."""
        return all(end.loss <= self.target_loss for end in self.ends)

    @property
    def duration_s(self) -> float:
        """Return the seeds' median."""
        return statistics.median(end.duration_s for end in self.ends)


def expected_s(end: Point, target_loss: float, num_hosts: int, rates: Rates) -> tuple[bool, float]:
    """Order trainings on an unlimited link by their time on a slow one; failed ones last, by loss.

    The time is that measured and that of each host's bytes, as nothing overlaps.
    """
    if not end.loss <= target_loss:
        return True, end.loss if math.isfinite(end.loss) else math.inf
    between_s = end.between_bytes * 8 / num_hosts / (1e6 * rates.between_mbit)
    within_s = end.within_bytes * 8 / num_hosts / (1e6 * rates.within_mbit)
    return False, end.duration_s + between_s + within_s


def ranking(standings: Sequence[Standing]) -> list[Standing]:
    """Order the methods: first those that reached the target, soonest first."""
    return sorted(standings, key=lambda each: (not each.has_reached_target, each.duration_s))


def table(standings: Sequence[Standing]) -> str:
    """Lay out a Markdown table, the first method first."""
    rules = ["---"] * len(COLUMNS)
    rows = [COLUMNS, rules, *(_row(each) for each in ranking(standings))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(each: Standing) -> list[str]:
    ends = each.ends
    unreached = f"not reached: {max(end.loss for end in ends):.2f}"
    step_ms = [1000 * end.duration_s / end.step for end in ends]
    return [
        each.method,
        f"{each.settings.learning_rate:g}",
        _further(each.settings),
        _spread([e.duration_s for e in ends], 1) if each.has_reached_target else unreached,
        _spread([e.step for e in ends]),
        _spread(step_ms),
        _spread([e.between_bytes / 1e6 for e in ends]),
        _spread([e.within_bytes / 1e6 for e in ends]),
    ]


def _further(settings: Settings) -> str:
    named = {
        "block": settings.block_size if settings.block_size > 1 else 0,
        "threshold": settings.gradient_threshold,
        "rank": settings.matrix_rank,
        "density": settings.density,
    }
    return ", ".join(f"{name} {value:g}" for name, value in named.items() if value)


def _spread(values: Sequence[float], num_digits: int = 0) -> str:
    low, middle, high = (
        f"{value:.{num_digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low}..{high})"
