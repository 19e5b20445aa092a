"""Kill ranks and torchrun itself at random while students train; start again until all is done.

Each trainer in turn fits the same small run. Every kill must end the other ranks soon, and the log
must name it. At the end the manifest, and so the model, must equal an undisturbed fit's, byte for
byte.
"""

import platform
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.store.object_store import ObjectStore
from jobs.run import JOBS
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import CHECKPOINTS_FOLDER, STUDENT, model_step
from tests.faults.killed_processes.torchrun_job import NUM_RANKS, TorchrunJob, strike
from tests.process_tree import lives
from tests.training.data.uneven_run import write_uneven_run
from tests.whole_path.processes import TINY
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import student_fit
from training.fit.train_model import fit_model
from training.settings.recipe import read_recipe

FIVE_STRIKES = ("rank", "rank", "rank", "stop", "torchrun")
STRIKES = {
    "synchronous": ("rank", "rank", "torchrun"),
    "gtc": FIVE_STRIKES,
    "bmuf": ("rank", "rank", "stop"),
    "htm": ("rank", "torchrun"),
    "one_bit": FIVE_STRIKES,
    "rand_psgd": ("rank", "stop", "torchrun"),
    "d_psgd": ("rank", "rank"),
    "d1d_psgd": ("rank", "stop"),
    "sparse_loco": ("rank", "torchrun"),
}
"""Each trainer meets these strikes in `make chaos`. Two trainers of one exchange share five: the
all-reduce of synchronous and D1D-PSGD, the rings, and the blocks of BMUF and SparseLoCo. HTM has
GTC's messages, and is struck in `make faults`, too.
AD-PSGD depends on timing, so no undisturbed model equals its own."""
TRAINERS = tuple(STRIKES)
PROGRAMS = dict.fromkeys(("gtc", "htm"), Path(__file__).with_name("two_backends.py"))
"""Trainers whose ranks have a group of two backends, as on GPUs."""
JOB_LIMIT_S = 1200.0
TIME_LIMIT_S = 20.0
_POLL_INTERVAL_S = 0.05
SETTINGS = (
    "models.student.num_units=16",
    "student.num_sub_epochs=4",
    "student.num_passes=8",
    "student.minibatch_frames=64",
    "checkpoints.steps=7",
)
PLAIN_SGD = 'student.optimizer={ name = "sgd", momentum = 0.0 }'
DOUBLE_BUFFERING = "student.trainer.double_buffering=true"
SHORT_BLOCKS = ("student.trainer.block_size=2",)
OWN_SETTINGS = {
    "one_bit": (PLAIN_SGD, DOUBLE_BUFFERING),
    "bmuf": SHORT_BLOCKS,
    "sparse_loco": SHORT_BLOCKS,
}


def settings_of(trainer: str) -> tuple[str, ...]:
    """Return the recipe's settings; 1-bit SGD needs another optimizer."""
    return (*SETTINGS, *OWN_SETTINGS.get(trainer, ()))


@dataclass
class Record:
    """Record holds the strikes by kind, the other ranks' seconds to end, and the outcome.

    `stopped` are the processes that were stopped, and `forced` those that torchrun killed because
    they did not end by its SIGTERM.
    """

    ended_s: dict[str, list[float]] = field(default_factory=dict)
    num_starts: int = 0
    num_resumed: int = 0
    stopped: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def table(self) -> str:
        """Lay out the strikes, and the time until the last of the other ranks had ended."""
        rows = []
        for kind, ended_s in sorted(self.ended_s.items()):
            median_s, longest_s = sorted(ended_s)[len(ended_s) // 2], max(ended_s)
            rows.append(f"{kind:<10}{len(ended_s):>4}  median {median_s:.1f} s, {longest_s:.1f} s")
        return "\n".join(
            [
                *rows,
                f"{self.num_starts} starts besides torchrun's own; {self.num_resumed} times ranks "
                f"resumed; {self.seconds:.0f} s",
                f"stopped: {self.stopped}; did not end by SIGTERM: {self.forced}",
                f"deaths that no message names: {self.unnamed or 'none'}",
                f"models unlike an undisturbed run's: {self.different or 'none'}",
            ]
        )


class RankChaos:
    """RankChaos fits one run and strikes its processes at random."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.record = Record()
        self._random = random.Random(seed)
        self._source = folder / "source"
        self._messages: dict[str, list[str]] = {}
        write_run(self._source)

    def fit(self, trainer: str, strikes: Sequence[str]) -> None:
        """Fit undisturbed and with these strikes (rank, torchrun, stop); compare the outcomes."""
        begun = time.monotonic()
        undisturbed = self._undisturbed(trainer)
        moments = [self._random.randrange(newest_step(undisturbed)) for _ in strikes]
        run = self.folder / f"{trainer}-{self.record.num_starts}"
        self._run(run, trainer, strikes, moments)
        if manifest_of(run) != manifest_of(undisturbed):
            self.record.different.append(trainer)
        self.record.seconds += time.monotonic() - begun

    def _undisturbed(self, trainer: str) -> Path:
        """Return the run of simulated ranks: 6 s of CPU, where torchrun's take 16."""
        run = self.folder / f"{trainer}-undisturbed"
        shutil.copytree(self._source, run)
        store = ObjectStore((str(run),))
        fit = student_fit(read_recipe(str(TINY), settings_of(trainer), {STUDENT: trainer}))
        simulate_ranks(NUM_RANKS, lambda group: fit_model(fit, store, str(run), group))
        return run

    def _run(self, run: Path, trainer: str, strikes: Sequence[str], moments: Sequence[int]) -> None:
        """Start until the job is done; strike before training, then after the steps `moments`."""
        shutil.copytree(self._source, run)
        pending = self._random.sample(strikes, len(strikes))
        steps = [-1, *sorted(moments)]
        job = self._start(run, trainer)
        deadline = time.monotonic() + JOB_LIMIT_S
        while (code := job.process.poll()) != 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{run.name}: exit code {code}: {job.text()[-4000:]}")
            if code is not None:
                job = self._start(run, trainer)
            # The ranks last: they are looked for among all of the host's processes.
            if pending and newest_step(run) >= steps[0] and len(job.ranks()) == NUM_RANKS:
                time.sleep(self._random.uniform(0, 4.0 if steps.pop(0) < 0 else 0.5))
                self._strike(job, pending.pop(0))
            time.sleep(_POLL_INTERVAL_S)
        resumed_after = re.findall(r"train student: resume after step (\d+),", job.text())
        self.record.num_resumed += sum(int(step) > 0 for step in resumed_after)
        said = job.text()
        self.record.forced += map(int, re.findall(r"Unable to shutdown process (\d+) via", said))
        for death, messages in self._messages.items():
            if not any(message in said for message in messages):
                self.record.unnamed.append(death)
        self._messages = {}

    def _start(self, run: Path, trainer: str) -> TorchrunJob:
        self.record.num_starts += 1
        options = ["--trainer", trainer, "--time-limit-s", str(TIME_LIMIT_S)]
        options += [part for setting in settings_of(trainer) for part in ("--set", setting)]
        program = PROGRAMS.get(trainer, JOBS / "train_student.py")
        return TorchrunJob.start(program, str(run), run.with_suffix(".log"), options)

    def _strike(self, job: TorchrunJob, kind: str) -> None:
        """Strike, wait until the earlier ranks have ended, and require the message."""
        ranks = job.ranks()
        rank = self._random.choice(sorted(ranks))
        victim = job.process.pid if kind == "torchrun" else ranks[rank]
        struck_at_s = time.monotonic()
        if not strike(victim, signal.SIGSTOP if kind == "stop" else signal.SIGKILL):
            return
        if kind == "stop":
            self.record.stopped.append(victim)
        while any(map(lives, ranks.values())):
            if time.monotonic() > struck_at_s + JOB_LIMIT_S:
                raise RuntimeError(
                    f"ranks {ranks} still run without process {victim}: {job.text()}"
                )
            job.process.poll()
            time.sleep(_POLL_INTERVAL_S)
        ended_s = time.monotonic() - struck_at_s
        self.record.ended_s.setdefault(kind, []).append(ended_s)
        self._messages[f"{kind}, process {victim}"] = (
            [f"process {victim}, which started it, is gone", "cannot reach the rendezvous store"]
            if kind == "torchrun"
            else [
                f"local_rank: {rank} (pid: {victim})",
                f"rank {rank} (host {platform.node()}, process {victim})",
                f"ranks [{rank}] of {NUM_RANKS} did not come",  # stopped before it registered
            ]
        )
        print(f"{kind} (rank {rank}): all ended in {ended_s:.1f} s", file=sys.stderr, flush=True)


def manifest_of(run: Path) -> bytes:
    """Read the manifest of the run's student."""
    return Path(manifest_uri(str(run), model_step(STUDENT))).read_bytes()


def newest_step(run: Path) -> int:
    """Return the step of the student's newest checkpoint; -1 before the first."""
    records = (run / model_step(STUDENT) / CHECKPOINTS_FOLDER).glob("*.json")
    return max((int(record.stem) for record in records), default=-1)


def write_run(folder: Path) -> None:
    """Write uneven partitions: whole ones are sharded where they suffice, rows where not."""
    lengths = [[30 + 41 * (7 * part + row) % 90 for row in range(12)] for part in range(6)]
    write_uneven_run(folder, lengths[:2], lengths[2:])
