"""Select and extract the few records that one test cares about, in a plain loop."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.manifest import Manifest, Output, read_output
from pipeline.settings import ExtractionConfig, SelectionConfig
from pipeline.shards import FeatureRow, read_features
from pipeline.steps.features import extract_features
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.small_corpus import flac, serially, tone

Record = dict[str, Any]
SELECTION = SelectionConfig(hours=0.0, file_hours=10 / 3600, seed=3)
EXTRACTION = ExtractionConfig(gets_in_flight=4, seed=3)


def record(utterance_id: str, speaker_id: str, minute: int, **changes: object) -> Record:
    """Make a metadata record, good unless changed."""
    good = {
        "utterance_id": utterance_id,
        "speaker_id": speaker_id,
        "duration_s": 1.0,
        "created_at": f"2026-01-01T00:{minute:02d}:00+00:00",
        "locale": "en-US",
        "audio_uri": f"audio/{utterance_id}",
    }
    return good | changes


def put_tone(store: ObjectStore, corpus_uri: str, utterance: Record, number: int) -> None:
    """Put a second of good audio for a record."""
    store.put(join_uri(corpus_uri, utterance["audio_uri"]), flac(tone(number, 1.0)))


def put_metadata(store: ObjectStore, corpus_uri: str, data: bytes, bucket: str = "00") -> None:
    """Put one metadata object of the unlabelled subset with exactly these bytes."""
    folder = join_uri(
        metadata_uri(corpus_uri, "unlabelled"), f"date=2026-01-01/speaker_bucket={bucket}"
    )
    store.put(join_uri(folder, "part-00000.jsonl"), data)


def lines_of(records: Iterable[Record]) -> bytes:
    """Encode records as metadata lines."""
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def select(store: ObjectStore, run_uri: str, corpus_uri: str) -> Manifest:
    """Select all of the unlabelled subset."""
    uri = metadata_uri(corpus_uri, "unlabelled")
    return select_utterances(store, run_uri, "unlabelled", uri, SELECTION, 0.99, serially).manifest


def extract(store: ObjectStore, run_uri: str, corpus_uri: str) -> Manifest:
    """Extract the selected utterances."""
    arguments = (store, run_uri, "unlabelled", corpus_uri, EXTRACTION, 0.99, serially)
    return extract_features(*arguments).manifest


def ledger(store: ObjectStore, run_uri: str, ledgers: Sequence[Output]) -> list[Record]:
    """Read all lines of JSON of a step's quarantine ledgers, or of other objects."""
    return [
        json.loads(line)
        for output in ledgers
        for line in read_output(store, run_uri, output).splitlines()
    ]


def features(store: ObjectStore, run_uri: str, manifest: Manifest) -> dict[str, FeatureRow]:
    """Read all feature rows by utterance."""
    rows = [
        row
        for output in manifest.outputs
        for row in read_features(read_output(store, run_uri, output))
    ]
    return {row.utterance_id: row for row in rows}
