"""Manifests that other tools write: what Python has no value for, and files with holes."""

import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.store.object_store import ObjectStore, StoreError
from pipeline.records import Quarantined, Utterance
from pipeline.steps.ingestion.ingest_manifests import Manifest
from pipeline.steps.ingestion.kaldi import Kaldi
from pipeline.steps.ingestion.lhotse import Lhotse, Shar
from pipeline.steps.ingestion.manifest_format import FormatOptions, ManifestFormat
from pipeline.steps.ingestion.manifest_probe import require_usable_rows
from pipeline.steps.ingestion.manifest_records import (
    RecordRules,
    records_of,
    with_audio,
    with_durations,
)
from pipeline.steps.ingestion.tables import Nemo, Table
from tests.small_corpus import tone, wav

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
    return list(records_of(rows, RecordRules("en", 4), "unlabelled", {}))


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


def found_in(
    folder: Path, form: ManifestFormat, name: str, channel: str = "only"
) -> list[Utterance | Quarantined]:
    """Read a labelled manifest as ingest does, where extraction hears this channel."""
    store = ObjectStore((str(folder),))
    found: list[Utterance | Quarantined] = []
    for piece in form.pieces(store, str(folder / name)):
        rows = with_audio(form.rows(store, piece), piece.folder, store.allowed_prefixes)
        rules = RecordRules("und", 4, channel=channel)
        found += records_of(with_durations(store, rows), rules, "labelled", {})
    return found


def write_json(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def supervision(start: float, duration: float, text: str = "A", **more: Any) -> dict[str, Any]:
    return {"id": text, "start": start, "duration": duration, "text": text, **more}


def cut(supervisions: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    source = {"type": "file", "channels": [0], "source": "r.wav"}
    recording = {"id": "r", "sources": [source], "duration": 9.0}
    about = {"id": 1, "start": 2.0, "duration": 3.0, "recording": recording}
    return {**about, "supervisions": list(supervisions), **more}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([supervision(0, 3)], "A"),
        ([supervision(-0.01, 3.02)], "A"),
        ([supervision(1.5, 1, "B"), supervision(0.5, 1, "A")], "A B"),
        ([supervision(1.0, 1, "B"), supervision(1.0, 1, "A")], "B A"),
        ([supervision(0, 3, channel=0), supervision(0, 3, "B", channel=[0])], "A B"),
        ([supervision(0, 3, gender="f", custom={"a": 1}, alignment={}, odd=None)], "A"),
    ],
)
def test_words_of_a_cut_are_in_order_of_time(
    tmp_path: Path, given: Sequence[Mapping[str, Any]], text: str
) -> None:
    """All that begin and end in it, to a frame, and those of equal times as they are listed."""
    write_json(tmp_path / "cuts.jsonl", [cut(given)])
    [record] = found_in(tmp_path, Lhotse(), "cuts.jsonl")
    assert isinstance(record, Utterance)
    assert (record.utterance_id, record.text) == ("1", text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (cut([supervision(-0.02, 2)]), "from -0.02 to 1.98 s of a cut of 3 s"),
        (cut([supervision(0, 3.02)]), "its words are not all spoken there"),
        (cut([supervision(0, 1), supervision(2.9, 9, "B")]), "from 2.9 to 11.9 s"),
        (cut([{"id": "s", "text": "A"}]), "need the start and the duration"),
        (cut([supervision(0, 1, channel=0), supervision(1, 1, channel=1)]), "channels 0 and 1"),
        (cut([supervision(0, 1, channel=1)], channel=0), "channels 0 and 1 in a cut"),
        (cut([], channel=1), "channel 1 of a file of channel 0"),
        (cut([supervision(0, 1, language="en"), supervision(1, 1, language="nl")]), "2 languages"),
        (cut([supervision(0, 1, speed=2)]), "supervisions: 'speed' is not known"),
        (cut([], recording={**cut([])["recording"], "folder": 5}), "recording: 'folder' is not k"),
        (cut([], type="PaddingCut", feat_value=0.0), "type = 'PaddingCut': need MonoCut"),
        (cut([], type="MixedCut", tracks=[1], transforms=[2]), "type = 'MixedCut': need MonoCut"),
        (cut([], transforms=[{"name": "Speed"}]), "transforms of a MonoCut: save the audio"),
    ],
)
def test_a_cut_of_other_audio_or_words_is_a_ledger_row(
    tmp_path: Path, given: Mapping[str, Any], said: str
) -> None:
    """What is not all spoken in it, in one channel, in one language, as it lies in the store."""
    write_json(tmp_path / "cuts.jsonl", [given])
    [row] = found_in(tmp_path, Lhotse(), "cuts.jsonl")
    assert isinstance(row, Quarantined)
    assert (row.utterance_id, row.reason) == ("1", "bad_field")
    assert said in row.detail


def test_supervisions_begin_within_their_recording(tmp_path: Path) -> None:
    """A cut's begin within the cut; a speaker may be a number."""
    write_json(tmp_path / "s.jsonl", [supervision(5, 2, recording_id="r", speaker=12)])
    write_json(tmp_path / "r.jsonl", [cut([])["recording"]])
    form = Lhotse(FormatOptions(recordings_uri=str(tmp_path / "r.jsonl")))
    [record] = found_in(tmp_path, form, "s.jsonl")
    assert isinstance(record, Utterance)
    assert (record.speaker_id, record.text, record.duration_s) == ("12", "A", 2)
    assert record.part is not None
    assert record.part.fields() == {"start_s": 5}


def test_a_window_in_a_shar_is_a_ledger_row(tmp_path: Path) -> None:
    """Its words are not all in its member, whose text was lost without one before."""
    for name, given in (("c0", supervision(0, 1)), ("c1", supervision(0, 2))):
        with (tmp_path / "cuts.000000.jsonl").open("a") as file:
            fields = {"id": name, "start": 0, "duration": 1.0, "supervisions": [given]}
            file.write(f"{json.dumps(fields)}\n")
    with tarfile.open(tmp_path / "recording.000000.tar", "w") as archive:
        for name in ("c0.wav", "c1.wav"):
            archive.addfile(tarfile.TarInfo(name))
    store = ObjectStore((str(tmp_path),))
    [piece] = Shar().pieces(store, str(tmp_path))
    kept, refused = Shar().rows(store, piece)
    assert not isinstance(kept, Quarantined)
    assert kept.fields["text"] == "A"
    assert isinstance(refused, Quarantined)
    assert "its words are not all spoken there" in refused.detail


def test_ids_that_a_shar_or_its_recordings_have_twice_are_ledger_rows(tmp_path: Path) -> None:
    """Which audio is meant cannot be known; the others are kept."""
    names = ("c0", "c1", "c0")
    with tarfile.open(tmp_path / "recording.000000.tar", "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"{name}.wav"))
    cuts = [{"id": name, "start": 0, "duration": 1.0, "supervisions": []} for name in names]
    write_json(tmp_path / "cuts.000000.jsonl", cuts)
    store = ObjectStore((str(tmp_path),))
    [piece] = Shar().pieces(store, str(tmp_path))
    rows = list(Shar().rows(store, piece))
    assert [isinstance(each, Quarantined) for each in rows] == [True, False, True]
    source = {"type": "file", "channels": [0], "source": "r.wav"}
    recordings = [
        {"id": name, "sources": [source], "duration": duration}
        for name, duration in (("r", 9.0), ("r", 8.0), ("s", 9.0), ("s", 9.0))
    ]
    write_json(tmp_path / "recordings.jsonl", recordings)
    said = [supervision(0, 9, recording_id=name, speaker="ann") for name in ("r", "s")]
    write_json(tmp_path / "supervisions.jsonl", said)
    form = Lhotse(FormatOptions(recordings_uri=str(tmp_path / "recordings.jsonl")))
    [piece] = form.pieces(store, str(tmp_path / "supervisions.jsonl"))
    of_r, of_s = form.rows(store, piece)
    assert isinstance(of_r, Quarantined)
    assert "no such recording, or several" in of_r.detail
    assert not isinstance(of_s, Quarantined)


@pytest.mark.usefixtures("quick_decisions")
def test_audio_that_is_away_for_a_moment_is_no_ledger_row(tmp_path: Path) -> None:
    """Where no object answers, access has failed: nothing is committed. One that is lost is one."""
    audio = tmp_path / "audio"
    audio.mkdir()
    for number in range(3):
        (audio / f"{number}.wav").write_bytes(wav(tone(number, 0.5)))
    write_json(
        tmp_path / "m.jsonl", [{"audio_filepath": f"audio/{n}.wav", "text": "A"} for n in range(3)]
    )
    audio.rename(tmp_path / "away")
    with pytest.raises(StoreError, match="restore access, then run the step again"):
        found_in(tmp_path, Nemo(), "m.jsonl")
    (tmp_path / "away").rename(audio)
    (audio / "1.wav").unlink()
    first, lost, last = found_in(tmp_path, Nemo(), "m.jsonl")
    assert isinstance(first, Utterance)
    assert isinstance(lost, Quarantined)
    assert lost.reason == "missing_object"
    assert isinstance(last, Utterance)


@pytest.mark.parametrize("shards", [("000000.", "000001."), ("",)])
def test_a_shar_that_lhotse_indexes_is_read(tmp_path: Path, shards: Sequence[str]) -> None:
    """Its cuts are plain lines, indices beside them are no cuts, and one shard has no number."""
    for number, shard in enumerate(shards):
        cut = {"id": f"c{number}", "start": 0, "duration": 1.0, "supervisions": []}
        (tmp_path / f"cuts.{shard}jsonl").write_text(f"{json.dumps(cut)}\n")
        with tarfile.open(tmp_path / f"recording.{shard}tar", "w") as archive:
            archive.addfile(tarfile.TarInfo(f"c{number}.flac"))
            archive.addfile(tarfile.TarInfo(f"c{number}.json"))
        for name in (f"cuts.{shard}jsonl", f"recording.{shard}tar"):
            (tmp_path / f"{name}.idx").write_bytes(bytes(16))
    store = ObjectStore((str(tmp_path),))
    rows = [
        row for piece in Shar().pieces(store, str(tmp_path)) for row in Shar().rows(store, piece)
    ]
    assert [row.fields["utterance_id"] for row in rows] == [f"c{n}" for n in range(len(shards))]
    assert len(list(Lhotse().pieces(store, str(tmp_path)))) == len(shards)


KALDI = {
    "wav.scp": "r r.wav\n",
    "segments": "u r 0.5 2\n",
    "text": "u HI\n",
    "spk2gender": "ann f\n",
    "split2/1/segments": "x r 0 1\n",
}


def kaldi(folder: Path, **files: str) -> Path:
    for name, text in {**KALDI, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "r.wav").write_bytes(wav(tone(1, 3)))
    return folder


@pytest.mark.parametrize(
    ("name", "line", "heard", "is_kept"),
    [
        ("segments", "u r 0.5 2 0", "only", True),
        ("segments", "u r 0.5 2 0", "0", True),
        ("segments", "u r 0.5 2 1", "1", True),
        ("segments", "u r 0.5 2 1", "only", False),
        ("segments", "u r 0.5 2 1", "0", False),
        ("segments", "u r 0.5 2 0", "mean", False),
        ("segments", "u r 0.5 2 B", "1", False),
        ("reco2file_and_channel", "r call A", "only", True),
        ("reco2file_and_channel", "r\tcall\tB", "1", True),
        ("reco2file_and_channel", "r call B", "only", False),
    ],
)
def test_the_channel_that_is_heard_may_be_named(
    tmp_path: Path, name: str, line: str, heard: str, is_kept: bool
) -> None:
    """In segments or beside them; another is a row: both sides of a call are never one."""
    [found] = found_in(kaldi(tmp_path, **{name: f"{line}\n"}), Kaldi(), "", heard)
    if is_kept:
        assert isinstance(found, Utterance)
        assert (found.text, found.duration_s) == ("HI", 1.5)
    else:
        assert isinstance(found, Quarantined)
        assert f"features.conversion.channel = '{heard}' hears" in found.detail


@pytest.mark.parametrize(
    "files", [{}, {"reco2dur": "r 3.0\n"}, {"utt2dur": "u 2.5\n", "reco2dur": "r 3.0\n"}]
)
def test_an_end_of_minus_one_is_the_recordings(tmp_path: Path, files: Mapping[str, str]) -> None:
    """By a table of durations, or else by the header of the audio."""
    [record] = found_in(kaldi(tmp_path, segments="u r 0.5 -1\n", **files), Kaldi(), "")
    assert isinstance(record, Utterance)
    assert record.duration_s == 2.5
    assert record.part is not None
    assert record.part.fields() == {"start_s": 0.5}


def test_a_transcript_without_audio_is_a_ledger_row(tmp_path: Path) -> None:
    """One for its text and its speaker."""
    tables = {"text": "u HI\nv HO\n", "utt2spk": "u s\nv s\n"}
    [record, row] = found_in(kaldi(tmp_path, **tables), Kaldi(), "")
    assert isinstance(record, Utterance)
    assert isinstance(row, Quarantined)
    assert (row.utterance_id, row.reason) == ("v", "bad_field")
    assert "text and utt2spk: v is not in segments: add its audio" in row.detail


def test_languages_and_placements_of_a_directory(tmp_path: Path) -> None:
    """utt2lang and utt2placement are used."""
    tables = {"utt2lang": "u nl\n", "utt2placement": "u DP1\n"}
    [record] = found_in(kaldi(tmp_path, **tables), Kaldi(), "")
    assert isinstance(record, Utterance)
    assert (record.locale, record.placement) == ("nl", "DP1")


@pytest.mark.parametrize("name", ["utt2emotion", "spk1.scp", "reco2segments"])
def test_a_table_that_is_not_known_is_refused(tmp_path: Path, name: str) -> None:
    """It may change what is heard; the option passes over it."""
    folder = kaldi(tmp_path, **{name: "u x\n"})
    with pytest.raises(ValueError, match=rf"{name}: a table .* --ignore-columns {name}"):
        found_in(folder, Kaldi(), "")
    assert len(found_in(folder, Kaldi(FormatOptions(ignored=frozenset({name}))), "")) == 1


NEMO = {"audio_filepath": "r.wav", "duration": 1.0, "text": "A"}


@pytest.mark.parametrize("key", ["channel", "offset_s", "end", "shard_id", "speaker_id"])
def test_a_key_that_is_not_known_is_refused_at_once_or_by_a_row(tmp_path: Path, key: str) -> None:
    """At once where the first row has it; the option passes over it; null is no value."""
    write_json(tmp_path / "m.jsonl", [{**NEMO, key: 1}, NEMO])
    store = ObjectStore((str(tmp_path),))
    manifest = Manifest("labelled", str(tmp_path / "m.jsonl"), Nemo())
    with pytest.raises(
        ValueError, match=f"m.jsonl: '{key}'.*: not known, .*--ignore-columns {key}"
    ):
        require_usable_rows(store, store, manifest, RecordRules("und", 4))
    assert len(found_in(tmp_path, Nemo(FormatOptions(ignored=frozenset({key}))), "m.jsonl")) == 2
    write_json(tmp_path / "m.jsonl", [{**NEMO, key: None}, {**NEMO, key: 1}])
    kept, row = found_in(tmp_path, Nemo(), "m.jsonl")
    assert isinstance(kept, Utterance)
    assert isinstance(row, Quarantined)
    assert row.reason == "unknown_field"


@pytest.mark.parametrize(
    ("named", "heard", "is_kept"),
    [
        (0, "only", True),
        ([0], "0", True),
        (1, "0", False),
        ([0, 1], "0", False),
        ("average", "mean", True),
        ("average", "0", False),
        (True, "1", False),
        (1.0, "1", True),
    ],
)
def test_channel_selector(tmp_path: Path, named: object, heard: str, is_kept: bool) -> None:
    """NeMo's channels are heard, or refused by a row."""
    write_json(tmp_path / "m.jsonl", [{**NEMO, "channel_selector": named}])
    [found] = found_in(tmp_path, Nemo(), "m.jsonl", heard)
    assert isinstance(found, Utterance) is is_kept


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"audio_filepath": "\ud800.wav"}, r"\\ud800.wav': need an s3:// URI or a local path"),
        ({"audio_filepath": "/\ud800.wav"}, r"\\ud800.wav': need an s3:// URI or a local path"),
        ({"offset": 10**400}, "start_s = 1000.*: need 0 to 10000000"),
        ({"offset": -1}, "start_s = -1: need 0 to 10000000"),
    ],
)
def test_a_path_or_offset_that_cannot_be_is_a_ledger_row(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """Without a duration, too, for which the audio is read."""
    write_json(tmp_path / "m.jsonl", [{"audio_filepath": "ok.wav", "text": "A", **changes}])
    (tmp_path / "ok.wav").write_bytes(wav(tone(440, 1.0)))
    [row] = found_in(tmp_path, Nemo(), "m.jsonl")
    assert isinstance(row, Quarantined)
    assert re.search(said, row.detail)


def test_a_repeated_key_is_a_ledger_row(tmp_path: Path) -> None:
    """Readers of JSON differ in which one they take."""
    text = json.dumps(NEMO)
    (tmp_path / "m.jsonl").write_text(f'{text[:-1]}, "text": "B"}}\n')
    [row] = found_in(tmp_path, Nemo(), "m.jsonl")
    assert isinstance(row, Quarantined)
    assert "field 'text' twice" in row.detail


def test_columns_of_parquet_that_are_not_known(tmp_path: Path) -> None:
    """They are refused by name; those of people and of pandas are harmless."""
    [first, _] = records(tmp_path, {"gender": ["f", "m"], "__index_level_0__": [0, 1]})
    assert isinstance(first, Utterance)
    with pytest.raises(ValueError, match=r"t\.parquet: 'start' \(is it start_s"):
        records(tmp_path, {"start": [1.0, 2.0]})


@pytest.mark.parametrize("character", ["\x00", "\x0b", "\x7f"])
def test_control_characters_in_transcripts_are_refused_in_any_format(
    tmp_path: Path, character: str
) -> None:
    """JSON lines, CSV, Parquet, lhotse and Kaldi: the row names the character."""
    text = f"A{character}B"
    write_json(tmp_path / "m.jsonl", [{**NEMO, "text": text}])
    write_json(tmp_path / "cuts.jsonl", [cut([supervision(0, 1, text)])])
    table = {"audio_uri": "r.wav", "duration_s": 1.0, "text": text}
    (tmp_path / "t.csv").write_text(f"audio_uri,duration_s,text\nr.wav,1.0,{text}\n")
    pq.write_table(pa.Table.from_pylist([table]), tmp_path / "t.parquet")
    kaldi(tmp_path / "k", text=f"u {text}\n")
    for form, name in (
        (Nemo(), "m.jsonl"),
        (Lhotse(), "cuts.jsonl"),
        (Table(), "t.csv"),
        (Table(), "t.parquet"),
        (Kaldi(), "k"),
    ):
        [row] = found_in(tmp_path, form, name)
        assert isinstance(row, Quarantined), name
        assert f"text has the control character U+{ord(character):04X}" in row.detail
