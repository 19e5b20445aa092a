"""Time the id index beside the other passes of a selection, and reading ids beside parsing.

python -m tests.benchmarks.id_index [--records 200000] [--rounds 3]

Half of the records are selected, from eight buckets, one task after the other.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from infra.store.object_store import join_uri
from pipeline.metadata import read_ids, read_records
from pipeline.steps.selection import select
from pipeline.steps.selection.select import SelectionConfig, metadata_uri, select_utterances
from tests.small_corpus import local_store, serially

NUM_BUCKETS, UTTERANCES_A_SPEAKER, DURATION_S = 8, 50, 3.6


def record(number: int) -> dict[str, Any]:
    """Make a record of an utterance as long as the paper's on average."""
    speaker = f"spk-{number // UTTERANCES_A_SPEAKER:07d}"
    return {
        "utterance_id": f"utt-{number:09d}",
        "speaker_id": speaker,
        "duration_s": DURATION_S,
        "created_at": "2026-01-01T12:00:00+00:00",
        "locale": "en-US",
        "audio_uri": f"s3://bucket/audio/{speaker}/utt-{number:09d}.flac",
    }


def time_passes(num_records: int) -> tuple[float, float]:
    """Select half of the records; return the seconds of the id index, and of the other passes."""
    seconds = [0.0]
    index_ids = select.index_ids

    def timed(*arguments: Any) -> Any:
        begun = time.perf_counter()
        found = index_ids(*arguments)
        seconds[0] = time.perf_counter() - begun
        return found

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        store, run_uri, corpus_uri = local_store(Path(folder))
        base = metadata_uri(corpus_uri, "unlabelled")
        for bucket in range(NUM_BUCKETS):
            uri = join_uri(base, f"date=2026-01-01/speaker_bucket={bucket:02d}/part-0.jsonl")
            store.put(uri, lines(n for n in range(num_records) if bucket_of(n) == bucket))
        patch.setattr(select, "index_ids", timed)
        config = SelectionConfig(num_records * DURATION_S / 7200, file_hours=5.0, seed=3)
        begun = time.perf_counter()
        select_utterances(store, run_uri, "unlabelled", base, config, 0.0, serially)
        return seconds[0], time.perf_counter() - begun - seconds[0]


def bucket_of(number: int) -> int:
    """Return the bucket of an utterance's speaker."""
    return number // UTTERANCES_A_SPEAKER % NUM_BUCKETS


def lines(numbers: Any) -> bytes:
    """Write records, one a line."""
    return "".join(json.dumps(record(each)) + "\n" for each in numbers).encode()


def time_reading(num_records: int) -> tuple[float, float]:
    """Read a metadata object's ids, then its records; return both times in seconds."""
    data, seconds = lines(range(num_records)), []
    for read in (read_ids, read_records):
        begun = time.perf_counter()
        assert sum(1 for _ in read(data, "part.jsonl")) == num_records
        seconds.append(time.perf_counter() - begun)
    return seconds[0], seconds[1]


def main() -> None:
    """Print microseconds a record: the median and the range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for names, measure in (
        (("id index", "other passes"), time_passes),
        (("read_ids", "read_records"), time_reading),
    ):
        rounds = [measure(arguments.records) for _ in range(arguments.rounds)]
        for name, found in zip(names, zip(*rounds, strict=True), strict=True):
            each = [1e6 * seconds / arguments.records for seconds in found]
            print(f"{name}: {statistics.median(each):.1f} ({min(each):.1f}..{max(each):.1f}) us")


if __name__ == "__main__":
    main()
