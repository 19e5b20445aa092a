"""Manifests that other tools write: what Python has no value for, and files with holes."""

import json
import tarfile
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined, Utterance
from pipeline.steps.ingestion.formats import Table
from pipeline.steps.ingestion.lhotse import Shar
from pipeline.steps.ingestion.manifest_records import RecordRules, records_of, with_audio

NOON = datetime(2026, 1, 1, 12)
MICROSECONDS = 1_767_268_800_000_000


def records(folder: Path, columns: dict[str, Any], **settings: Any) -> list[Any]:
    """Return what the rows of a Parquet file with these columns become."""
    store, uri = ObjectStore((str(folder),)), str(folder / "t.parquet")
    fields = {"utterance_id": ["u", "v"], "duration_s": [1.5, 2.5], "audio_uri": ["u", "v"]}
    pq.write_table(pa.table({**fields, **columns}), uri, **settings)
    table = Table()
    (piece,) = table.pieces(store, uri)
    rows = with_audio(table.rows(store, piece), str(folder), store.allowed_prefixes)
    return list(records_of(rows, RecordRules("en", 4), "unlabelled"))


@pytest.mark.parametrize(
    ("cells", "settings"),
    [
        (pa.array([MICROSECONDS] * 2, pa.timestamp("us", "UTC")), {}),
        (pa.array([1000 * MICROSECONDS + 1] * 2, pa.timestamp("ns", "UTC")), {}),
        (pa.array([NOON] * 2, pa.timestamp("us")), {"use_deprecated_int96_timestamps": True}),
    ],
)
def test_times_of_any_unit_are_instants(
    tmp_path: Path, cells: pa.Array, settings: dict[str, Any]
) -> None:
    """Nanoseconds, and the INT96 that Spark and Hive write without a zone, are UTC."""
    first, _ = records(tmp_path, {"created_at": cells}, **settings)
    assert isinstance(first, Utterance)
    assert first.created_at == "2026-01-01T12:00:00+00:00"


def test_a_time_beyond_the_calendar_is_a_ledger_row(tmp_path: Path) -> None:
    """It ends neither the task nor the rows beside it; a time without a zone is a row, too."""
    far = pa.array([2**62, MICROSECONDS], pa.timestamp("us", "UTC"))
    refused, kept = records(tmp_path, {"created_at": far})
    assert isinstance(refused, Quarantined)
    assert (refused.utterance_id, refused.reason) == ("u", "bad_timestamp")
    assert isinstance(kept, Utterance)
    without_zone = records(tmp_path, {"created_at": [NOON, NOON]})
    assert [each.reason for each in without_zone] == ["bad_timestamp"] * 2


def test_decimals_are_numbers(tmp_path: Path) -> None:
    """A warehouse's DECIMAL is a duration, or an id; a span of time is neither."""
    decimals = {
        "duration_s": pa.array([Decimal("1.50"), Decimal("2.00")], pa.decimal128(9, 2)),
        "speaker_id": pa.array([Decimal(7), Decimal(8)], pa.decimal128(9, 0)),
    }
    found = records(tmp_path, decimals)
    assert [(each.duration_s, each.speaker_id) for each in found] == [(1.5, "7"), (2.0, "8")]
    spans = records(tmp_path, {"duration_s": [timedelta(seconds=1)] * 2})
    assert [each.reason for each in spans] == ["bad_duration"] * 2


def test_a_member_with_holes_is_no_utterance(tmp_path: Path) -> None:
    """Of a sparse file the archive has no zeros, so a range of it would be other samples."""
    info = tarfile.TarInfo("c0.wav")
    info.size, info.type = 512, tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    # One piece of 512 bytes behind a hole of 4,096; the real size; then the checksum again.
    header[386:410] = b"%011o\0%011o\0" % (4096, 512)
    header[483:495] = b"%011o\0" % 4608
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "recording.000000.tar").write_bytes(bytes(header) + b"\1" * 512 + bytes(1024))
    cut = {"id": "c0", "duration": 1.0}
    (tmp_path / "cuts.000000.jsonl").write_text(json.dumps(cut))
    store = ObjectStore((str(tmp_path),))
    (piece,) = Shar().pieces(store, str(tmp_path))
    (row,) = Shar().rows(store, piece)
    assert isinstance(row, Quarantined)
    assert "no plain file with the id" in row.detail
