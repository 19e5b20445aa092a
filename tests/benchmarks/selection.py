"""Measure selection at scale: speed and memory of each pass over synthetic metadata.

python -m tests.benchmarks.selection [--records 10000000] [--gzip] [--folder DIR] [--json]

Makes the metadata (speakers of about 50 utterances, log-normal durations, six months; buckets are
alike but for the names) and selects a tenth of its hours on local Spark with two cores, then a
small labelled subset, which is compared. Extrapolates to 1e9 records: processor time by the number
of records, the driver's memory by building all that it would then keep.
"""

import argparse
import gzip
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from infra.cluster import load_cluster
from infra.spark.session import run_tasks, spark_session
from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Manifest, Output
from pipeline.settings import SelectionConfig
from pipeline.steps.hash_ranges import Gathered
from pipeline.steps.selection.buckets import Bucket
from pipeline.steps.selection.deduplicate import RangeTask
from pipeline.steps.selection.id_index import FILES_A_TASK
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.benchmarks.measure import Figure, show
from tests.benchmarks.processes import ProcessWatch, peak_mb, with_core_seconds

T = TypeVar("T")
R = TypeVar("R")

NUM_BUCKETS = 200
NUM_MONTHS = 6
UTTERANCES_PER_SPEAKER = 50
FILE_HOURS = 5.0
BUCKET_MARK = b"####"
NUM_CORES = 2
# A million hours: metadata by day of half a year, in buckets of a million records.
PROJECTED_RECORDS = 10**9
PROJECTED_BUCKETS, PROJECTED_DATES, PROJECTED_RANGES, PROJECTED_FILES = 1000, 180, 94, 200_000
SHARE = 0.1
LABELLED_RECORDS = 1000
COMPARING_PASSES = ("hash the subsets", "compare the subsets")


@dataclass(frozen=True)
class Recipe:
    """Recipe describes what one process makes: a bucket's records, by month."""

    folder: str
    num_records: int
    compressed: bool


def make_bucket(recipe: Recipe, bucket: int) -> int:
    """Write one bucket's metadata objects; return the milliseconds of its records.

    Buckets differ in the number that is in all names: making a hundred million records one by one
    would take longer than selecting from them.
    """
    duration_ms, months = made_once(recipe.num_records)
    for month, lines in months.items():
        write_object(recipe, bucket, month, lines.replace(BUCKET_MARK, b"%04d" % bucket))
    return duration_ms


@cache
def made_once(num_records: int) -> tuple[int, dict[int, bytes]]:
    """Return the milliseconds of a bucket's records, and each month's lines, with marked names."""
    generator = np.random.default_rng(num_records)
    n, mark = num_records, BUCKET_MARK.decode()
    durations_ms = np.clip(generator.lognormal(np.log(3000), 0.6, n), 300, 60_000).astype(int)
    activity = generator.lognormal(0, 1, max(1, n // UTTERANCES_PER_SPEAKER)).cumsum()
    speakers = np.searchsorted(activity, generator.random(n) * activity[-1])
    months, days = generator.integers(1, NUM_MONTHS + 1, n), generator.integers(1, 29, n)
    lines = {}
    for month in range(1, NUM_MONTHS + 1):
        of_month = [
            f'{{"audio_uri": "audio/{each % 256:02x}/{mark}-{each:09d}.flac", "created_at": '
            f'"2026-{month:02d}-{days[each]:02d}T{each % 24:02d}:{each % 60:02d}:07+00:00", '
            f'"duration_s": {durations_ms[each] / 1000}, "locale": "en-US", "speaker_id": '
            f'"speaker-{mark}-{speakers[each]:07d}", "utterance_id": '
            f'"utterance-{mark}-{each:09d}"}}\n'
            for each in np.flatnonzero(months == month).tolist()
        ]
        lines[month] = "".join(of_month).encode()
    return int(durations_ms.sum()), lines


def write_object(recipe: Recipe, bucket: int, month: int, data: bytes) -> None:
    """Write one metadata object."""
    name = f"date=2026-{month:02d}-01/speaker_bucket={bucket:04d}/part-00000.jsonl"
    path = Path(recipe.folder, name + (".gz" if recipe.compressed else ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 1, mtime=0) if recipe.compressed else data)


def make_metadata(folder: str, num_records: int, compressed: bool) -> float:
    """Write metadata of `num_records` in other processes, to keep our memory; return its hours."""
    recipe = Recipe(folder, num_records // NUM_BUCKETS, compressed)
    with ProcessPoolExecutor(NUM_CORES, get_context("spawn")) as pool:
        return sum(pool.map(partial(make_bucket, recipe), range(NUM_BUCKETS))) / 3_600_000


@dataclass
class Watch:
    """Watch records core seconds of each pass, and peak memory of JVM and largest Python worker.

    `compared` holds those of the passes that compare the selection with another subset's.
    """

    core_seconds: dict[str, float] = field(default_factory=dict)
    compared: dict[str, float] = field(default_factory=dict)
    processes: ProcessWatch = field(default_factory=ProcessWatch)

    def timed(self, distribute: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Sum each distributed pass's processor time, which other processes do not lengthen."""

        def run(elements: Sequence[T], function: Callable[[T], R], description: str) -> list[Any]:
            started = time.perf_counter()
            results = distribute(elements, partial(with_core_seconds, function), description)
            seconds = time.perf_counter() - started
            self.core_seconds[description] = sum(core_seconds for _, core_seconds in results)
            print(f"{description}: {seconds:.1f} s", file=sys.stderr, flush=True)
            return [result for result, _ in results]

        return run


def select(folder: str, run_uri: str, hours: float, watch: Watch) -> Manifest:
    """Select a tenth of the hours with the real step, on two cores."""
    config = SelectionConfig(hours=SHARE * hours, file_hours=FILE_HOURS, seed=7)
    store = ObjectStore((folder, run_uri))
    with spark_session("selection benchmark", load_cluster("demo")) as session:
        run_tasks(session, range(NUM_CORES), abs, "start the workers")
        distribute = watch.timed(partial(run_tasks, session))
        uri = metadata_uri(folder, "unlabelled")
        with watch.processes.watching():
            manifest = select_utterances(
                store, run_uri, "unlabelled", uri, config, 0.0, distribute
            ).manifest
            other = Watch()
            uri = metadata_uri(folder, "labelled")
            make_bucket(Recipe(uri, LABELLED_RECORDS, compressed=False), NUM_BUCKETS)
            distribute = other.timed(partial(run_tasks, session))
            select_utterances(store, run_uri, "labelled", uri, config, 0.0, distribute)
        watch.compared = {name: other.core_seconds[name] for name in COMPARING_PASSES}
        return manifest


def figures(
    manifest: Manifest, watch: Watch, start_mb: float, driver_mb: float, wall_s: float
) -> list[Figure]:
    """Return what is printed; of one run, each figure is its own range."""
    n, files = manifest.tally_in.utterances, manifest.statistics["files"]
    budget_ms = round(manifest.config["hours"] * 3_600_000)
    values = {name: (n / seconds, "records/s/core") for name, seconds in watch.core_seconds.items()}
    core_s = sum(watch.core_seconds.values())
    num_compared = manifest.tally_out.utterances + LABELLED_RECORDS
    for name, seconds in watch.compared.items():
        values[name] = (num_compared / seconds, "selected records/s/core")
    values |= {
        "all passes": (n / core_s, "records/s/core"),
        "wall time": (wall_s, "s"),
        "driver, peak": (driver_mb, "MB"),
        "driver, before": (start_mb, "MB"),
        "JVM, peak": (watch.processes.peak_of("JVM"), "MB"),
        "largest Python worker, peak": (watch.processes.peak_of("worker"), "MB"),
        "largest file over mean": (files["imbalance"], ""),
        "hours over budget": (100 * (manifest.tally_out.duration_ms / budget_ms - 1), "%"),
    }
    values |= projection(core_s / n)
    return [Figure.of(name, [value], unit) for name, (value, unit) in values.items()]


def projection(core_s_per_record: float) -> dict[str, tuple[float, str]]:
    """Project to 1e9 records: core-hours by the speed here, memory by what a driver keeps."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        driver_mb = pool.submit(keep_what_the_driver_keeps).result()
    return {
        "1e9 records": (PROJECTED_RECORDS * core_s_per_record / 3600, "core-hours"),
        "1e9 records, driver's growth": (driver_mb, "MB"),
    }


def keep_what_the_driver_keeps() -> float:
    """Return the growth in MB of a process that holds a driver's data for 1e9 records."""
    before_mb = peak_mb()
    digests = (f"{number:064x}" for number in itertools.count())

    def outputs(num: int, name: str) -> tuple[Output, ...]:
        return tuple(
            Output(
                f"selection/unlabelled/{name}-{each:05d}-{next(digests)[:16]}.jsonl",
                10**6,
                next(digests),
                5000,
                10**7,
            )
            for each in range(num)
        )

    buckets = [
        Bucket(
            f"bucket-{bucket:04d}",
            tuple(
                f"s3://bucket/corpus/metadata/unlabelled/date=2026-{date:03d}/"
                f"speaker_bucket={bucket:04d}/part-00000.jsonl.gz"
                for date in range(PROJECTED_DATES)
            ),
            tuple(next(digests) for _ in range(PROJECTED_DATES)),
        )
        for bucket in range(PROJECTED_BUCKETS)
    ]
    inputs = {
        uri: digest for each in buckets for uri, digest in zip(each.uris, each.digests, strict=True)
    }
    context = step_context(ObjectStore(()), "s3://bucket/run", "selection/unlabelled", {}, {})
    indexes = [outputs(1, f"scratch/{each.name}") for each in buckets]
    hashes = Gathered(context, (), PROJECTED_RANGES)  # which the store lists
    ranges = [RangeTask(number, hashes) for number in range(PROJECTED_RANGES)]
    selected = [outputs(1, f"scratch/selected-{each.name}") for each in buckets]
    num_hashed = PROJECTED_BUCKETS + PROJECTED_FILES // FILES_A_TASK
    hashed = [outputs(1, f"scratch/ids-of-{each}") for each in range(num_hashed)]
    files = outputs(PROJECTED_FILES, "group-00000")
    tally = sum((each.tally for each in files), Tally())
    manifest = Manifest("selection/unlabelled", {}, inputs, files, tally_in=tally, tally_out=tally)
    assert manifest.to_bytes()
    assert all((indexes, ranges, selected, hashed))
    return peak_mb() - before_mb


def main() -> None:
    """Make metadata, select, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--gzip", action="store_true", help="compressed metadata")
    parser.add_argument("--folder", help="where to make the metadata; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        uri = join_uri(folder, "corpus")
        hours = make_metadata(metadata_uri(uri, "unlabelled"), arguments.records, arguments.gzip)
        watch, start_mb, started = Watch(), peak_mb(), time.perf_counter()
        manifest = select(uri, join_uri(folder, "run"), hours, watch)
        wall_s = time.perf_counter() - started
        kind = "gzip" if arguments.gzip else "plain"
        title = f"selection of {SHARE:.0%} of {hours:.0f} h, {arguments.records} records, {kind}"
        show(title, figures(manifest, watch, start_mb, peak_mb(), wall_s), arguments.json)


if __name__ == "__main__":
    main()
