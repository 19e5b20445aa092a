"""Kill executors, workers, Python workers and drivers at random while the steps run on a cluster.

python -m tests.faults.killed_processes.chaos --kills 200 --run-folder /var/tmp/chaos [--seed 1]

Each round runs the four Spark steps in a fresh run on a standalone cluster with eager speculation,
from the package and not from the checkout. A killed step is submitted again, as a scheduler would
do. Every round must end with the manifests of an undisturbed run, byte by byte.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from infra.store.object_store import ObjectStore, join_uri
from tests.faults.killed_processes.chaos_record import Record, count_attempts
from tests.faults.killed_processes.chaos_run import (
    OVERRIDES,
    STEPS,
    Undisturbed,
    require_books,
    store_random_teacher,
)
from tests.faults.killed_processes.killer import Killer
from tests.faults.killed_processes.packaged_steps import (
    PackagedSteps,
    prepare,
    remove_dead_executors,
)
from tests.standalone_cluster import StandaloneCluster, last_lines, running_cluster
from tests.whole_path.processes import TINY

MAX_KILLS_PER_STEP = 8
STEP_LIMIT_S = 600.0
QUIET_LIMIT_S = 90.0
_POLL_INTERVAL_S = 0.05  # looking for a victim among all processes takes 2 ms of CPU


@dataclass
class Chaos:
    """Chaos runs rounds of the four steps on one cluster, with one corpus."""

    steps: PackagedSteps
    undisturbed: Undisturbed
    killer: Killer
    record: Record

    def run(self, num_kills: int, runs_uri: str) -> Record:
        """Run rounds below `runs_uri` until that many processes, of all kinds, have been killed."""
        started, earlier = time.monotonic(), set(self.steps.events.iterdir())
        while not self.record.different and not self._is_enough(num_kills):
            self._round(join_uri(runs_uri, f"round-{self.record.num_rounds + 1}"), num_kills)
            remove_dead_executors(self.steps.cluster)
        self.record.stray = wait_until_quiet(self.steps.cluster)
        self.record.attempts = count_attempts(set(self.steps.events.iterdir()) - earlier)
        self.record.seconds += time.monotonic() - started
        return self.record

    def _is_enough(self, num_kills: int) -> bool:
        return self.record.kills.total() >= num_kills and self.record.has_all_kinds()

    def _round(self, run_uri: str, num_kills: int) -> None:
        store = ObjectStore((run_uri,))
        store_random_teacher(store, run_uri)
        self.record.num_rounds += 1
        for step in STEPS:
            # Rounded up for targets: they have a device server beside what every step has.
            is_targets = step == "generate_targets"
            number = -(-num_kills // len(STEPS)) if is_targets else num_kills // len(STEPS)
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
        killed = self.killer.kill(kind, processes, self.steps.packages[step].program)
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


def main() -> None:
    """Parse the command line, run, print the table; return exit code 1 if anything was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30, help="default: 30")
    parser.add_argument("--run-folder", type=Path, required=True, help="a fresh folder")
    parser.add_argument("--runs", help="s3:// URI for the runs; default: below --run-folder")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments; default: 1")
    arguments = parser.parse_args()
    folder = arguments.run_folder.resolve()
    undisturbed = Undisturbed.make(folder / "undisturbed")
    with running_cluster(folder / "cluster") as cluster:
        steps = prepare(folder, cluster)
        chaos = Chaos(steps, undisturbed, Killer(arguments.seed), Record())
        record = chaos.run(arguments.kills, arguments.runs or str(folder / "runs"))
    print(record.table())
    sys.exit(bool(record.different or record.stray))


if __name__ == "__main__":
    main()
