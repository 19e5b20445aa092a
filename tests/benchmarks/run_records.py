"""Measure the driver of a large step: memory and time of a resume, beside one that holds commits.

python -m tests.benchmarks.run_records [--outputs 1000000] [--held 20000] [--json]

All tasks of a step of feature extraction have their commit records, as after a kill before the
manifest. Two processes fold them, as a cluster's would. Each figure is of a process of its own; the
peer reads every commit in the driver, as steps of up to 4,000 tasks do.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.normalization import Moments
from pipeline.records import Tally
from pipeline.runs import engine
from pipeline.runs.commit import Commit, StepContext, step_context
from pipeline.runs.engine import NumberedTasks, StepRun, StepSpec, TaskPlan, run_step, run_tasks
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, sha256
from pipeline.runs.names import COMMITS_FOLDER, task_name
from pipeline.runs.outputs import Output
from pipeline.shuffling import shuffle
from pipeline.steps.features import add_statistics
from tests.benchmarks.measure import Figure, show
from tests.benchmarks.processes import with_core_seconds

T = TypeVar("T")
R = TypeVar("R")

STEP, CONFIG, INPUTS = "features/unlabelled", {"seed": 3}, {"selection/unlabelled": "0123"}
NUM_PROCESSES = 2
_NAME, _DIGEST = "@task", sha256(b"a shard's digest, in place of each")


@dataclass(frozen=True)
class Driven:
    """Driven holds a driver's seconds, its and its tasks' processor time, MB, what it stored."""

    seconds: float
    driver_cpu_s: float
    tasks_cpu_s: float
    grown_mb: float
    peak_mb: float
    manifest_bytes: int
    num_parts: int


def context_in(folder: str) -> StepContext:
    return step_context(ObjectStore((folder,)), folder, STEP, CONFIG, INPUTS)


def write_commits(folder: str, numbers: range) -> None:
    """Write a commit record for each number, and no shard."""
    context = context_in(folder)
    # A record made and sealed by itself takes 690 us: 12 minutes for a million.
    whole = commit_of(context, _NAME, _DIGEST).to_bytes().decode()
    document = json.loads(whole)
    seal = document.pop("sha256")
    plain = json.dumps(document, sort_keys=True)
    assert sha256(plain.encode()) == seal
    for number in numbers:
        name, digest = task_name(number), sha256(str(number).encode())
        own, sealed = (
            text.replace(_DIGEST[:16], digest[:16]).replace(_DIGEST[16:], digest[16:])
            for text in (plain.replace(_NAME, name), whole.replace(_NAME, name))
        )
        data = sealed.replace(seal, sha256(own.encode())).encode()
        Path(context.commit_uri(name)).write_bytes(data)


def commit_of(context: StepContext, name: str, digest: str) -> Commit:
    """Make the commit of a task that wrote one shard of five hours."""
    generator = np.random.default_rng(3)
    moments = Moments.of(generator.normal(10, 3, (50, NUM_BINS)).astype(np.float16)).to_dict()
    tally = Tally(5_000, 18_000_000)
    key = f"{STEP}/ab/{name}-000-{digest[:16]}.parquet"
    return Commit(
        name,
        context.fingerprint,
        (Output(key, 118_000_000, digest, tally.utterances, tally.duration_ms),),
        ledger=None,
        tally_in=tally,
        quarantined=Tally(),
        statistics={"moments": moments},
        versions=context.versions,
    )


def resume(folder: str, num_outputs: int, max_held: int) -> Driven:
    """Resume the step, and write its manifest."""
    context = context_in(folder)
    engine.MAX_HELD = max_held
    Path(manifest_uri(folder, STEP)).unlink(missing_ok=True)
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("forkserver")) as pool:
        list(pool.map(abs, range(NUM_PROCESSES)))
        before_mb, tasks_s = peak_mb(), list[float]()
        started, driver_s = time.perf_counter(), time.process_time()
        run_step(spec(context), partial(plan_and_run, num_outputs, partial(in_pool, pool, tasks_s)))
        seconds, driver_s = time.perf_counter() - started, time.process_time() - driver_s
    peak = peak_mb()
    manifest = read_manifest(context.store, folder, STEP)
    assert len(manifest.outputs) == num_outputs
    size = Path(manifest_uri(folder, STEP)).stat().st_size
    grown = peak - before_mb
    return Driven(seconds, driver_s, sum(tasks_s), grown, peak, size, len(manifest.parts))


def spec(context: StepContext) -> StepSpec:
    return StepSpec(context.store, context.run_uri, STEP, CONFIG, digests=INPUTS)


def plan_and_run(num_outputs: int, distribute: Any, step: StepRun) -> Manifest:
    plan = TaskPlan(
        NumberedTasks(range(num_outputs), named),
        no_work,
        distribute,
        0.0,
        fold=add_statistics,
        order=partial(shuffle, seed=3),
        num_utterances=5_000 * num_outputs,
    )
    return run_tasks(step, plan)


def named(name: str, number: int) -> str:
    del number
    return name


def no_work(_: str) -> Any:
    raise AssertionError("every task has its commit")


def in_pool(
    pool: ProcessPoolExecutor,
    seconds: list[float],
    elements: Sequence[T],
    function: Callable[[T], R],
    description: str,
) -> list[R]:
    del description
    found = list(pool.map(partial(with_core_seconds, function), elements))
    seconds += (core_seconds for _, core_seconds in found)
    return [result for result, _ in found]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: str, num_outputs: int, max_held: int) -> Driven:
    """Resume in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(resume, folder, num_outputs, max_held).result()


def figures(name: str, num_outputs: int, found: Driven) -> list[Figure]:
    values = (
        ("seconds", found.seconds, "s"),
        ("a commit", 1e6 * found.seconds / num_outputs, "us"),
        ("a commit, processor time of tasks", 1e6 * found.tasks_cpu_s / num_outputs, "us"),
        ("a commit, processor time of the driver", 1e6 * found.driver_cpu_s / num_outputs, "us"),
        ("driver's peak", found.peak_mb, "MB"),
        ("an output in the driver", 2**20 * found.grown_mb / num_outputs, "B"),
        ("manifest.json", found.manifest_bytes / 1e3, "kB"),
        ("parts", found.num_parts, ""),
    )
    return [
        Figure.of(f"{name}, {num_outputs:,}: {of}", [value], unit) for of, value, unit in values
    ]


def main() -> None:
    """Print each driver's figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outputs", type=int, default=1_000_000)
    parser.add_argument("--held", type=int, default=20_000, help="commits that the peer holds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: list[Figure] = []
    with TemporaryDirectory() as folder:
        Path(folder, STEP, COMMITS_FOLDER).mkdir(parents=True)
        first = 0
        for size in (arguments.held, arguments.outputs):
            write_commits(folder, range(first, size))
            first = size
            if size == arguments.held:
                found += figures("holds commits", size, measure(folder, size, size))
            found += figures("folds commits", size, measure(folder, size, engine.MAX_HELD))
    show("Resume of a step whose tasks have all committed", found, arguments.json)


if __name__ == "__main__":
    main()
