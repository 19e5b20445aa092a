"""Count what a selection of many buckets and ranges stores, asks for, and passes by its driver.

python -m tests.benchmarks.selection_requests [--buckets 64] [--ranges 8] [--records 100]
    [--twice 0]

Each bucket has so many records of four speakers; `--twice` of them are in the next bucket, too.
"""

import argparse
import hashlib
import json
import pickle
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from pipeline.runs.manifest import Manifest
from pipeline.steps.selection.select import SelectionConfig, metadata_uri, select_utterances
from tests.small_corpus import local_store, serially

DURATION_S = 3.6


def record(number: int, speaker: str) -> dict[str, Any]:
    """Make a record; its utterance's id is its number."""
    return {
        "utterance_id": f"utt-{number:09d}",
        "speaker_id": speaker,
        "duration_s": DURATION_S,
        "created_at": "2026-01-01T12:00:00+00:00",
        "locale": "en-US",
        "audio_uri": f"audio/utt-{number:09d}.flac",
    }


def write_metadata(
    store: ObjectStore, base: str, num_buckets: int, num_records: int, num_twice: int
) -> int:
    """Write the metadata objects, one a bucket; return their bytes."""
    num_bytes = 0
    for bucket in range(num_buckets):
        own = bucket * num_records
        before = (bucket - 1) % num_buckets * num_records
        lines = [record(own + each, f"spk-{bucket}-{each % 4}") for each in range(num_records)]
        lines += [record(before + each, f"spk-{bucket}-0") for each in range(num_twice)]
        data = "".join(json.dumps(each) + "\n" for each in lines).encode()
        store.put(join_uri(base, f"speaker_bucket={bucket:05d}/part-0.jsonl"), data)
        num_bytes += len(data)
    return num_bytes


def selected(
    store: ObjectStore, run_uri: str, base: str, hours: float, range_bytes: int
) -> tuple[Manifest, Counter[str]]:
    """Select a half; return the manifest, and the pickled bytes of tasks and results by pass."""
    passed = Counter[str]()

    def weighing(elements: Any, function: Any, description: str) -> list[Any]:
        # As Spark does: each task by itself.
        passed[f"to {description}"] += sum(len(pickle.dumps(each)) for each in elements)
        results = serially(elements, function, description)
        passed[f"from {description}"] += sum(len(pickle.dumps(each)) for each in results)
        return results

    config = SelectionConfig(hours / 2, file_hours=5.0, seed=3)
    bound = "pipeline.steps.selection.deduplicate._RANGE_BYTES"
    with mock.patch(bound, range_bytes):
        place = store, run_uri, "unlabelled", base
        return select_utterances(*place, config, 1.0, weighing).manifest, passed


def main() -> None:
    """Print objects, requests, and bytes through the driver, of one selection."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--buckets", type=int, default=64)
    parser.add_argument("--ranges", type=int, default=8)
    parser.add_argument("--records", type=int, default=100, help="of each bucket")
    parser.add_argument("--twice", type=int, default=0, help="of these, in the next bucket too")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        store, run_uri, corpus_uri = local_store(Path(folder))
        base = metadata_uri(corpus_uri, "unlabelled")
        sizes = arguments.buckets, arguments.records, arguments.twice
        num_bytes = write_metadata(store, base, *sizes)
        hours = arguments.buckets * arguments.records * DURATION_S / 3600
        before = REQUESTS.total()
        range_bytes = 2 * num_bytes // (2 * arguments.ranges - 1)
        manifest, passed = selected(store, run_uri, base, hours, range_bytes)
        made = REQUESTS.total() - before
        stored = store.list(join_uri(run_uri, "selection"))
    assert len(manifest.id_index) == arguments.ranges
    print(f"{len(stored)} objects, {made.put} PUT, {made.get} GET, {made.list} LIST")
    for name, size in passed.items():
        print(f"{size:12,} bytes {name}")
    print(f"{passed.total():12,} bytes in all")
    print(f"SHA-256 of the manifest: {hashlib.sha256(manifest.to_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
