"""Bad metadata of every kind costs a ledger row each in selection and extraction, and no harm."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined
from pipeline.runs.manifest import Manifest
from pipeline.steps.selection.select import metadata_uri
from tests.faults.bad_input.metadata_kinds import BAD, GOOD, GOOD_LINE
from tests.faults.bad_input.small_runs import (
    extract,
    features,
    ledger,
    lines_of,
    put_metadata,
    put_tone,
    record,
    select,
)
from tests.small_corpus import local_store

pytestmark = pytest.mark.timeout(300)
NEIGHBOURS = [record(f"good-{minute}", "speaker", minute) for minute in (0, 2)]
Run = tuple[ObjectStore, str, str]


def run_beside_neighbours(folder: Path, lines: bytes) -> Run:
    """Make a run whose metadata holds these lines between two good ones of the same speaker."""
    store, run_uri, corpus_uri = local_store(folder)
    for number, utterance in enumerate([*NEIGHBOURS, record("odd", "speaker", 1)]):
        put_tone(store, corpus_uri, utterance, number)
    first, last = (lines_of([neighbour]) for neighbour in NEIGHBOURS)
    put_metadata(store, corpus_uri, first + lines + b"\n" + last)
    return store, run_uri, corpus_uri


def features_of(run: Run) -> dict[str, np.ndarray]:
    rows = features(*run[:2], extract(*run))
    return {name: row.features for name, row in rows.items()}


def test_bad_lines_have_a_row_each_and_harm_no_neighbour(tmp_path: Path) -> None:
    """A row has the reason and the readable fields; the good lines around keep every bit."""
    clean = run_beside_neighbours(tmp_path / "clean", b"")
    select(*clean)
    run = run_beside_neighbours(tmp_path, b"\n".join(kind.line for kind in BAD.values()))
    manifest = select(*run)
    require_balance(manifest, len(BAD) + 2)
    rows = ledger(*run[:2], manifest.ledgers)
    for (name, expected), row in zip(BAD.items(), rows, strict=True):
        assert row["reason"] == expected.reason, name
        assert row["utterance_id"] == expected.utterance_id, name
        assert row["duration_ms"] == expected.duration_ms, name
        assert 0 < row["num_bytes"] <= len(expected.line), name
        assert 0 < len(row["detail"]) <= 300, name
        assert len(json.dumps(row)) < 15_000, name
    assert manifest.quarantined.duration_ms == sum(row["duration_ms"] for row in rows)
    kept, undisturbed = features_of(run), features_of(clean)
    assert kept.keys() == undisturbed.keys() == {"good-0", "good-2"}
    for name, values in kept.items():
        np.testing.assert_array_equal(values, undisturbed[name])


def require_balance(manifest: Manifest, num_records: int) -> None:
    """Require that every line is accounted for."""
    assert manifest.tally_in.utterances == num_records
    assert manifest.tally_in == manifest.tally_out + manifest.quarantined + manifest.unselected


@pytest.mark.parametrize("kind", GOOD)
def test_an_unusual_line_that_is_good_is_kept(tmp_path: Path, kind: str) -> None:
    """An unusual line is selected and has features."""
    store, run_uri, corpus_uri = run_beside_neighbours(tmp_path, GOOD[kind].line)
    require_balance(select(store, run_uri, corpus_uri), 3)
    rows = features(store, run_uri, extract(store, run_uri, corpus_uri))
    assert rows.keys() == {"good-0", "odd", "good-2"}


def test_a_repeated_id_is_quarantined(tmp_path: Path) -> None:
    """The first record with an id counts."""
    store, run_uri, corpus_uri = run_beside_neighbours(tmp_path, b"")
    put_metadata(store, corpus_uri, lines_of([*NEIGHBOURS, record("good-0", "speaker", 5)]))
    manifest = select(store, run_uri, corpus_uri)
    require_balance(manifest, 3)
    (row,) = ledger(store, run_uri, manifest.ledgers)
    assert (row["reason"], row["utterance_id"]) == ("duplicate_utterance", "good-0")


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(GOOD_LINE * 50, mtime=0)[:-30],
        gzip.compress(GOOD_LINE)[:5],
        b"",
        GOOD_LINE,
        gzip.compress(GOOD_LINE)[:-8] + bytes(8),
        gzip.compress(GOOD_LINE) + b"trailing bytes",
    ],
    ids=["cut", "header cut", "empty", "plain", "bad checksum", "bytes after it"],
)
def test_an_archive_that_is_none_is_an_error(tmp_path: Path, data: bytes) -> None:
    """An archive of unknown records cannot have a row for each, so the step fails."""
    store, run_uri, corpus_uri = run_beside_neighbours(tmp_path, b"")
    folder = f"{metadata_uri(corpus_uri, 'unlabelled')}/date=2026-01-02/speaker_bucket=00"
    store.put(join_uri(folder, "part-00000.jsonl.gz"), data)
    with pytest.raises(ValueError, match=r"part-00000.jsonl.gz: no whole gzip file"):
        select(store, run_uri, corpus_uri)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://user:hunter2@host/a.flac", "https://***@host/a.flac"),
        ("s3://key:hunter2/with/slashes@bucket/a.flac", "s3://***@bucket/a.flac"),
        (
            "https://b.s3.amazonaws.com/a?X-Amz-Signature=hunter2&X-Amz-Date=1",
            "X-Amz-Signature=***",
        ),
        ("s3://bucket/a.flac?token=hunter2", "token=***"),
    ],
)
def test_the_ledger_keeps_no_secret_of_a_uri(uri: str, shown: str) -> None:
    """Passwords and signed queries are starred out of the URI and of the detail."""
    row = Quarantined("odd", uri, "outside_prefixes", f"{uri}: outside", 0, 1000)
    assert "hunter2" not in row.to_json()
    assert shown in row.audio_uri
    assert shown in row.detail


def test_an_ordinary_uri_is_kept_as_it_is() -> None:
    """Colons, at signs and question marks are letters of a key."""
    for uri in ("s3://bucket/a:b@c.flac", "audio/what?.flac", "/corpus/a&b=c.flac"):
        assert Quarantined("odd", uri, "missing_object", uri, 0, 1000).audio_uri == uri
