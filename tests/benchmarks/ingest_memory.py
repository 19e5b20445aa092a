"""Measure the memory of ingest's driver, whose tasks run in processes of their own.

python -m tests.benchmarks.ingest_memory --rows 20000 80000

Rows in random order are of 28 days and 64 buckets, so that nearly each one is an object of its own.
Each size runs in a new process; its largest resident memory, minus that before the step, counts.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from infra.store.object_store import ObjectStore
from pipeline.steps.ingestion import manifest_rows
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion, ingest_manifests
from pipeline.steps.ingestion.manifest_records import RecordRules
from pipeline.steps.ingestion.tables import Table

NUM_DAYS, NUM_BUCKETS, ROWS_A_PIECE = 28, 64, 500
NUM_WORKERS = 2

T = TypeVar("T")
R = TypeVar("R")


def write_rows(count: int, path: Path) -> int:
    """Write rows of metadata, a line each, whose days are in random order; return the bytes."""
    generator = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            row = {
                "utterance_id": f"u{number:08d}",
                "speaker_id": f"s{generator.randrange(count):08d}",
                "duration_s": 1.5,
                "created_at": f"2026-01-{1 + generator.randrange(NUM_DAYS):02d}T12:00:00+00:00",
                "audio_uri": f"audio/{number:08d}.flac",
            }
            file.write(json.dumps(row) + "\n")
    return path.stat().st_size


def measure(count: int) -> None:
    """Ingest so many rows, and print the objects and the driver's memory as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        store, run = ObjectStore((folder,)), f"{folder}/run"
        uri = f"{folder}/m.jsonl"
        num_bytes = write_rows(count, Path(uri))
        manifest_rows.PIECE_BYTES = ROWS_A_PIECE * num_bytes // count
        with ProcessPoolExecutor(NUM_WORKERS, get_context("fork")) as pool:
            list(pool.map(os.getpid, ()))

            def in_processes(
                elements: Sequence[T], function: Callable[[T], R], _description: str
            ) -> list[R]:
                return list(pool.map(function, elements))

            named = Manifest("unlabelled", uri, Table())
            ingestion = ManifestIngestion(store, [named], RecordRules("en", NUM_BUCKETS), {}, {})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = ingest_manifests(store, run, f"{run}/corpus", ingestion, 1.0, in_processes)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = (after - before) / 1024
        print(json.dumps({"rows": count, "objects": len(result.manifest.outputs), "MiB": grown}))


def main() -> None:
    """Measure each size in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 80_000])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(*arguments.rows)
        return
    for count in arguments.rows:
        command = [sys.executable, "-m", "tests.benchmarks.ingest_memory", "--one", "--rows"]
        subprocess.run([*command, str(count)], check=True)


if __name__ == "__main__":
    main()
