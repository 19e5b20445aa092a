"""Kill executors, workers, Python workers and drivers at random while the steps run on a cluster.

Each round runs Spark steps in a fresh run on a standalone cluster with eager speculation, from the
package and not from the checkout: all four, or two where few are to be killed. A killed step is
submitted again, as a scheduler would do. Every round must end with the manifests of an undisturbed
run, byte by byte.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from infra.store.object_store import ObjectStore, join_uri
from tests.faults.killed_processes.chaos_run import (
    OVERRIDES,
    STEPS,
    Undisturbed,
    chaos_recipe,
    require_books,
    run_plainly,
    store_random_teacher,
)
from tests.faults.killed_processes.killer import KINDS, Killer
from tests.faults.killed_processes.packaged_steps import PackagedSteps, remove_dead_executors
from tests.standalone_cluster import StandaloneCluster, last_lines
from tests.whole_path.processes import TINY

MAX_KILLS_PER_STEP = 8
STEP_LIMIT_S = 600.0
QUIET_LIMIT_S = 90.0
_POLL_INTERVAL_S = 0.05  # looking for a victim among all processes takes 2 ms of CPU


def struck_steps(num_kills: int) -> tuple[str, ...]:
    """Return the steps to strike: with few kills, one without a device and one with it."""
    return STEPS if num_kills > MAX_KILLS_PER_STEP else ("extract_features", "generate_targets")


@dataclass
class Record:
    """Record holds kills by `(kind, step)`, pauses and submissions by step, and the outcome."""

    steps: tuple[str, ...]
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
        return all(map(self.of_kind, KINDS)) and all(map(self.of_step, self.steps))

    def table(self) -> str:
        """Lay out the kills by step and kind, and the outcome."""
        kinds = sorted({kind for kind, _ in self.kills} | set(KINDS))
        titles = ("killed", *kinds, "paused", "submitted")
        rows = []
        for step in self.steps:
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


@dataclass
class Chaos:
    """Chaos runs rounds of the steps on one cluster, with one corpus."""

    steps: PackagedSteps
    undisturbed: Undisturbed
    killer: Killer
    record: Record

    def run(self, num_kills: int, runs_uri: str) -> None:
        """Run rounds below `runs_uri` until that many processes, of all kinds, have been killed."""
        started, earlier = time.monotonic(), set(self.steps.events.iterdir())
        while not self.record.different and not self._is_enough(num_kills):
            self._round(join_uri(runs_uri, f"round-{self.record.num_rounds + 1}"), num_kills)
            remove_dead_executors(self.steps.cluster)
        self.record.stray = wait_until_quiet(self.steps.cluster)
        self.record.attempts = count_attempts(set(self.steps.events.iterdir()) - earlier)
        self.record.seconds += time.monotonic() - started

    def _is_enough(self, num_kills: int) -> bool:
        return self.record.kills.total() >= num_kills and self.record.has_all_kinds()

    def _round(self, run_uri: str, num_kills: int) -> None:
        corpus_uri, struck = self.undisturbed.corpus_uri, self.record.steps
        store = ObjectStore((run_uri, corpus_uri))
        store_random_teacher(store, run_uri)
        self.record.num_rounds += 1
        for step in STEPS:
            if step not in struck:
                run_plainly(step, store, run_uri, corpus_uri, chaos_recipe())
                continue
            # Rounded up for targets: they have a device server beside what every step has.
            is_targets = step == "generate_targets"
            number = -(-num_kills // len(struck)) if is_targets else num_kills // len(struck)
            kinds = self.killer.kinds(step, min(MAX_KILLS_PER_STEP, max(1, number)))
            kills = self._step(step, run_uri, kinds)
            self.record.kills.update({(kind, step): count for kind, count in kills.items()})
            said = f"round {self.record.num_rounds}: {step}: killed {dict(kills)}"
            print(said, file=sys.stderr, flush=True)
        self.record.different += self.undisturbed.differences(store, run_uri)
        require_books(store, run_uri)

    def _step(self, step: str, run_uri: str, pending: list[str]) -> Counter[str]:
        """Run one step to its end through these kills; submit it again when its driver dies."""
        kills: Counter[str] = Counter()
        process, driver_killed = self._submit(step, run_uri), False
        deadline = time.monotonic() + STEP_LIMIT_S
        next_kill = time.monotonic() + self.killer.delay_s(step)
        while (code := process.poll()) != 0:
            if time.monotonic() > deadline:
                raise self._problem(step, f"not done within {STEP_LIMIT_S:g} s")
            if code is not None and not driver_killed:
                raise self._problem(step, f"exit code {code}, though its driver was not killed")
            if code is not None:
                process, driver_killed = self._submit(step, run_uri), False
            if pending and time.monotonic() >= next_kill and self._kill(step, pending[0]):
                driver_killed = driver_killed or pending[0] == "driver"
                kills[pending.pop(0)] += 1
                next_kill = time.monotonic() + self.killer.delay_s(step)
            self.killer.resume()
            self.steps.cluster.restart_dead_workers()
            time.sleep(_POLL_INTERVAL_S)
        if pending:
            self.killer.hasten(step)
        return kills

    def _submit(self, step: str, run_uri: str) -> "subprocess.Popen[bytes]":
        self.record.submissions[step] += 1
        overrides = [f"corpus.uri={self.undisturbed.corpus_uri}", *OVERRIDES]
        settings = [part for override in overrides for part in ("--set", override)]
        return self.steps.submit(step, "--recipe", str(TINY), "--run", run_uri, *settings)

    def _kill(self, step: str, kind: str) -> bool:
        processes = self.steps.cluster.processes()
        killed = self.killer.kill(kind, processes, self.steps.program(step))
        self.record.pauses[step] += killed and self.killer.pause(processes)
        return killed

    def _problem(self, step: str, problem: str) -> RuntimeError:
        return RuntimeError(f"{step}: {problem}: {last_lines(self.steps.log(step))}")


def wait_until_quiet(cluster: StandaloneCluster) -> list[str]:
    """Wait for the processes of the last job; return those that outlive it for too long."""
    deadline = time.monotonic() + QUIET_LIMIT_S
    while True:
        commands = cluster.processes().values()
        others = [command for command in commands if "org.apache.spark.deploy." not in command]
        if not others or time.monotonic() > deadline:
            return others
        time.sleep(0.5)
