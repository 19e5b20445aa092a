"""Run each step of a run as a user starts it; measure its processes and requests."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.task_metrics import RequestCounts
from jobs.run import JOBS, launches, step_environment
from tests.benchmarks.processes import ProcessWatch
from tests.whole_path.processes import REPOSITORY, TINY

KINDS = ("JVM", "driver", "worker", "server")
UTTERANCES_A_BUCKET = 20_000


@dataclass(frozen=True)
class Measured:
    """Measured holds what a step took: seconds, peaks by kind of process, requests, bytes."""

    step: str
    wall_s: float
    cpu_s: Mapping[str, float]
    peak_mb: Mapping[str, float]
    requests: int
    bytes_read: int
    bytes_written: int

    @property
    def cpu_in_all(self) -> float:
        """Sum the processor time of all processes."""
        return sum(self.cpu_s.values())


def settings(seconds_a_file: float, hours: float, prefix: str) -> list[str]:
    """Adapt the tests' tiny recipe: files of so many seconds, a network that takes little time."""
    file_hours = seconds_a_file / 3600
    values = (
        f"corpus.audio_prefixes=['{prefix}']",
        f"selection.hours={hours}",
        f"selection.file_hours={file_hours}",
        f"partitions.partition_hours={file_hours}",
        "partitions.num_source_shards=4",
        "targets.request_frames=8192",
        "alignment.rounds=1",
        "student.minibatch_frames=8192",
        "student.trainer={name = 'synchronous'}",
        "teacher.trainer={name = 'synchronous'}",
        "baseline.trainer={name = 'synchronous'}",
    )
    return [part for value in values for part in ("--set", value)]


def manifests(corpus: Path, num_utterances: int) -> list[str]:
    """Return ingest's arguments."""
    named = {
        "labelled": corpus / "labelled.jsonl",
        "heldout": corpus / "heldout.jsonl",
        "unlabelled": corpus / "unlabelled",
    }
    found = [part for name, path in named.items() for part in ("--manifest", f"{name}={path}")]
    buckets = max(16, num_utterances // UTTERANCES_A_BUCKET)
    options = ("--format", "table", "--speaker-buckets", str(buckets))
    return [*found, *options, "--lexicon", str(corpus / "lexicon.txt")]


def run_steps(
    corpus: Path, run: Path, num_utterances: int, shared: Sequence[str], last: str
) -> Iterator[Measured]:
    """Run the steps of a run up to the `last`, then two queries; yield each as it ends."""
    shared = ["--recipe", str(TINY), "--run", str(run), "--json", *shared]
    sources = manifests(corpus, num_utterances)
    for launch in launches(sources, 1, 1, device="cpu"):
        yield measured(launch.step, launch.command(shared))
        if launch.step == last:
            break
    wanted = ("--utterance", f"utt-{num_utterances // 2:09d}")
    for name, options in {"verify": (), "inspect_utterance": wanted}.items():
        yield measured(name, [sys.executable, str(JOBS / f"{name}.py"), *shared, *options])


def measured(step: str, command: Sequence[str]) -> Measured:
    """Run one command; AssertionError with its last lines if it fails."""
    watch, started = ProcessWatch(), time.perf_counter()
    with watch.watching():
        done = subprocess.run(
            command,
            check=False,
            cwd=REPOSITORY,
            env=step_environment(),
            capture_output=True,
            text=True,
        )
    wall_s = time.perf_counter() - started
    assert done.returncode == 0, f"{step}: {done.stderr[-4000:]}\n{done.stdout[-2000:]}"
    requests = counted(json.loads(done.stdout.splitlines()[-1]))
    return Measured(
        step,
        wall_s,
        {kind: watch.seconds_of(kind) for kind in KINDS},
        {kind: watch.peak_of(kind) for kind in KINDS},
        requests.num_requests,
        requests.bytes_received,
        requests.bytes_sent,
    )


def counted(said: Mapping[str, Any]) -> RequestCounts:
    """Return the requests that a job says it has made."""
    return RequestCounts(**said["requests"])
