"""Record the kills of a chaos run, and count the task attempts in Spark's event logs."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.killed_processes.chaos_run import STEPS
from tests.faults.killed_processes.killer import KINDS


@dataclass
class Record:
    """Record holds kills by `(kind, step)`, pauses and submissions by step, and the outcome."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    pauses: Counter[str] = field(default_factory=Counter)
    submissions: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)
    num_rounds: int = 0
    seconds: float = 0.0

    def of_kind(self, kind: str) -> int:
        """Count the kills of one kind, in all steps."""
        return sum(count for (each, _), count in self.kills.items() if each == kind)

    def of_step(self, step: str) -> int:
        """Count the kills in one step, of all kinds."""
        return sum(count for (_, each), count in self.kills.items() if each == step)

    def has_all_kinds(self) -> bool:
        """Return whether each kind was killed, and something was killed in each step."""
        return all(map(self.of_kind, KINDS)) and all(map(self.of_step, STEPS))

    def table(self) -> str:
        """Lay out the kills by step and kind, and the outcome."""
        kinds = sorted({kind for kind, _ in self.kills} | set(KINDS))
        titles = ("killed", *kinds, "paused", "submitted")
        rows = []
        for step in STEPS:
            counts = (self.kills[kind, step] for kind in kinds)
            rows.append((step, *counts, self.pauses[step], self.submissions[step]))
        identical = f"no: {', '.join(self.different)}" if self.different else "yes"
        return "\n".join(
            [
                *("".join(f"{cell!s:<18}" for cell in row).rstrip() for row in (titles, *rows)),
                f"{self.kills.total()} kills, {self.num_rounds} rounds, {self.seconds:.0f} s",
                f"task attempts: {dict(sorted(self.attempts.items()))}",
                f"manifests identical to an undisturbed run's: {identical}",
                f"processes left behind: {self.stray or 'none'}",
            ]
        )


def count_attempts(event_logs: Iterable[Path]) -> Counter[str]:
    """Count task attempts, speculative ones, and their ends, from Spark's event logs."""
    counts: Counter[str] = Counter()
    for log in event_logs:
        for line in log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:  # the last line of a killed driver may be cut off
                continue
            if event["Event"] == "SparkListenerTaskStart":
                counts["started"] += 1
                counts["speculative"] += event["Task Info"]["Speculative"]
            elif event["Event"] == "SparkListenerTaskEnd":
                counts[event["Task End Reason"]["Reason"]] += 1
    return counts
