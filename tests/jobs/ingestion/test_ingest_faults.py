"""Faulty utterances become ledger rows, faulty tables one sentence; neither is half a corpus."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import soundfile

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from pipeline.audio.decode import decode_utterance
from pipeline.metadata import read_records
from pipeline.records import Tally, Utterance
from pipeline.runs.manifest import read_manifest
from pipeline.steps.ingestion.kaldi_directory import DirectoryIngestion, plan_copy
from tests.job_programs import RunJob
from tests.jobs.ingestion.conftest import append, copied, write

TINY = Path(__file__).parents[2] / "whole_path" / "tiny.toml"
LONG = "a" * 300
NUM_DAMAGES = 150


@dataclass(frozen=True)
class Fault:
    """Fault holds lines for the tables, the ledger's reason and its detail."""

    reason: str
    detail: str
    lines: dict[str, str]
    utterance_id: str = "ann-3"
    unreadable: bool = field(default=False)


def added(utterance_id: str, speaker: str = "ann", text: str = "HELLO") -> dict[str, str]:
    """Name the first speaker's first file under another id."""
    return {
        "wav.scp": f"{utterance_id} audio/ann-1.flac",
        "utt2spk": f"{utterance_id} {speaker}",
        "text": f"{utterance_id} {text}",
    }


FAULTS = {
    "a missing WAV": Fault(
        "missing_object", "'audio/none.wav'", added("ann-3") | {"wav.scp": "ann-3 audio/none.wav"}
    ),
    "a folder for a WAV": Fault(
        "missing_object", "'audio'", added("ann-3") | {"wav.scp": "ann-3 audio"}
    ),
    "a control character in a path": Fault(
        "missing_object", r"'audio/\x01.wav'", added("ann-3") | {"wav.scp": "ann-3 audio/\x01.wav"}
    ),
    "a NUL in a path": Fault(
        "missing_object", r"'audio/\x00.wav'", added("ann-3") | {"wav.scp": "ann-3 audio/\0.wav"}
    ),
    "a path of 5,000 characters": Fault(
        "missing_object",
        "there is no such file as wav.scp names",
        added("ann-3") | {"wav.scp": f"ann-3 {'a' * 5000}"},
    ),
    "half of the duration in utt2dur": Fault(
        "duration_mismatch",
        "the file lasts 0.500 s, utt2dur says 1.000 s",
        added("ann-3") | {"utt2dur": "ann-3 1.00"},
    ),
    "an id of 300 characters": Fault("bad_field", "305 bytes: need at most 255", added(LONG), LONG),
    "an id of 2,000 characters": Fault(
        "bad_field", "2005 bytes: need at most 255", added("a" * 2000), "a" * 1024
    ),
    "a control character in an id": Fault(
        "bad_field", r"utterance_id = 'ann\x1f3'", added("ann\x1f3"), "ann\x1f3"
    ),
    "a control character in a transcript": Fault(
        "bad_field", "text has the control character U+0007", added("ann-3", text="HEL\x07LO")
    ),
    "a carriage return in a transcript": Fault(
        "bad_field", "text has the control character U+000D", added("ann-3", text="HELLO\rWORLD")
    ),
    "an endless transcript": Fault(
        "malformed_json", "a line beyond 1048576 bytes", added("ann-3", text="HELLO " * 200_000), ""
    ),
    "a duration of 1e308": Fault(
        "bad_duration",
        "need 0.001 to 86400",
        added("ann-3") | {"utt2dur": "ann-3 1e308"},
        unreadable=True,
    ),
    "a locale of 2,000 characters": Fault(
        "bad_field",
        "locale has 2000 characters",
        added("zed-1", "zed") | {"spk2locale": "zed " + "e" * 2000, "labelled.speakers": "zed"},
        "zed-1",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_utterance_is_a_row_and_the_others_are_ingested(
    kaldi_dir: Path, tmp_path: Path, kind: str
) -> None:
    """Its row names it and the reason; the six others are in the corpus, and the books balance."""
    fault, corpus = FAULTS[kind], tmp_path / "corpus"
    for name, line in fault.lines.items():
        append(kaldi_dir, name, line)
    if fault.unreadable:
        (kaldi_dir / "audio" / "bad.flac").write_bytes(b"not audio")
        table = (kaldi_dir / "wav.scp").read_text()
        (kaldi_dir / "wav.scp").write_text(table.replace("ann-3 audio/ann-1", "ann-3 audio/bad"))
    found = copied(kaldi_dir, corpus)
    (row,) = found.plan.quarantined
    assert (row.reason, row.utterance_id) == (fault.reason, fault.utterance_id)
    assert fault.detail in row.detail
    kept = sum((output.tally for output in found.outputs), Tally())
    assert kept == Tally(6, 3000)
    assert len(list(corpus.glob("audio/*/*"))) == 6


def test_an_id_may_be_as_long_as_a_files_name(kaldi_dir: Path, tmp_path: Path) -> None:
    """With its suffix 255 bytes; of 256 it is a row."""
    for name in ("b" * 250, "c" * 251):
        for table, line in added(name).items():
            append(kaldi_dir, table, line)
    corpus = tmp_path / "corpus"
    found = copied(kaldi_dir, corpus)
    assert [row.utterance_id for row in found.plan.quarantined] == ["c" * 251]
    assert len(list(corpus.glob(f"audio/*/{'b' * 250}.flac"))) == 1


EXTREMES = {
    "9999-12-31T23:59:59-14:00": "date=9999-12-31",
    "0001-01-01T00:00:00+14:00": "date=0001-01-01",
    "9999-12-31T23:59:59+00:00": "date=9999-12-31",
}


@pytest.mark.parametrize("moment", EXTREMES)
def test_an_extreme_time_is_ingested(kaldi_dir: Path, tmp_path: Path, moment: str) -> None:
    """At the calendar's edges, where UTC is in another year, an utterance has its own date."""
    write(kaldi_dir, "utt2time", [f"bob-1 {moment}"])
    corpus = tmp_path / "corpus"
    copied(kaldi_dir, corpus)
    (path,) = corpus.glob(f"metadata/unlabelled/{EXTREMES[moment]}/*/*.jsonl")
    ((_, record),) = read_records(path.read_bytes(), str(path))
    assert isinstance(record, Utterance)
    assert record.created_at == moment


TABLES = ("wav.scp", "text", "utt2spk", "labelled.speakers", "heldout.speakers")


@pytest.mark.parametrize("name", TABLES)
def test_a_byte_order_mark_is_no_part_of_a_table(
    kaldi_dir: Path, tmp_path: Path, name: str
) -> None:
    """With it and with the line ends of Windows, a table makes the same corpus."""
    plain, marked = (tmp_path / each for each in ("plain", "marked"))
    first = copied(kaldi_dir, plain)
    data = (kaldi_dir / name).read_bytes().replace(b"\n", b"\r\n")
    (kaldi_dir / name).write_bytes(b"\xef\xbb\xbf" + data)
    second = copied(kaldi_dir, marked)
    assert second.outputs == first.outputs


def test_a_faulty_table_is_refused_before_anything_is_written(
    kaldi_dir: Path, tmp_path: Path
) -> None:
    """A table in UTF-16 is one sentence that names it."""
    (kaldi_dir / "text").write_text("ann-1 HELLO\n", encoding="utf-16")
    with pytest.raises(ValueError, match="text: not UTF-8"):
        copied(kaldi_dir, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_a_file_of_a_terabyte_is_a_row(kaldi_dir: Path, tmp_path: Path) -> None:
    """It is not read into memory: extraction would refuse it as well."""
    corpus = tmp_path / "corpus"
    with (kaldi_dir / "audio" / "ann-1.flac").open("ab") as file:
        file.truncate(2**40)
    (row,) = copied(kaldi_dir, corpus).plan.quarantined
    assert row.reason == "too_large"
    assert row.detail.startswith("1099511627776 bytes: need at most 47")


def test_a_file_that_changes_meanwhile_is_refused(kaldi_dir: Path, tmp_path: Path) -> None:
    """Its record would state a length that the stored bytes do not have."""
    corpus = str(tmp_path / "corpus")
    planned = plan_copy(DirectoryIngestion(kaldi_dir))
    (kaldi_dir / "audio" / "ann-1.flac").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"ann-1.flac: changed while it was ingested"):
        planned.write(ObjectStore((corpus,)), corpus)


def test_audio_of_equal_size_is_told_apart(kaldi_dir: Path, tmp_path: Path) -> None:
    """A repeated ingest compares bytes, not sizes, and then writes nothing."""
    corpus = tmp_path / "corpus"
    copied(kaldi_dir, corpus)
    (audio,) = corpus.glob("audio/*/bob-1.flac")
    audio.write_bytes(audio.read_bytes()[:-1] + b"!")
    next(corpus.glob("audio/*/ann-1.flac")).unlink()
    with pytest.raises(ValueError, match=r"bob-1.flac is from another corpus"):
        copied(kaldi_dir, corpus)
    assert not list(corpus.glob("audio/*/ann-1.flac"))


def test_in_s3_a_repeated_ingest_compares_etags(kaldi_dir: Path, s3_bucket: str) -> None:
    """The ETag of one PUT is its MD5, so the audio is not fetched; other bytes are refused."""
    corpus_uri = f"s3://{s3_bucket}/corpus"
    store = ObjectStore((corpus_uri,))
    plan_copy(DirectoryIngestion(kaldi_dir)).write(store, corpus_uri)
    before = REQUESTS.total()
    plan_copy(DirectoryIngestion(kaldi_dir)).write(store, corpus_uri)
    assert (REQUESTS.total() - before).get < 6
    (audio,) = [each for each in store.list(corpus_uri) if each.uri.endswith("bob-1.flac")]
    data = store.get(audio.uri)
    assert hashlib.md5(data).hexdigest() == audio.etag
    store.put(audio.uri, data[:-1] + b"!")
    with pytest.raises(ValueError, match=r"bob-1.flac is from another corpus"):
        plan_copy(DirectoryIngestion(kaldi_dir)).write(store, corpus_uri)


@pytest.mark.parametrize(("budget", "code"), [("0.2", 0), ("0.1", 3)])
def test_the_loss_budget_bounds_what_ingest_leaves_out(
    run_job: RunJob, kaldi_dir: Path, tmp_path: Path, budget: str, code: int
) -> None:
    """Within it the ledger is in the manifest; beyond it exit code 3 and no corpus."""
    (kaldi_dir / "audio" / "ann-2.flac").unlink()
    run_uri = str(tmp_path / "run")
    arguments = ("--recipe", str(TINY), "--run", run_uri, "--kaldi-dir", str(kaldi_dir))
    said = run_job("ingest", *arguments, "--set", f"loss_budget={budget}")
    assert said.code == code, said.err
    (path,) = Path(run_uri).glob("ingest/*/*.ledger.jsonl")
    assert json.loads(path.read_text())["reason"] == "missing_object"
    if code:
        assert "1 of 6 utterances quarantined" in said.err
        assert not Path(run_uri, "corpus").exists()
        return
    manifest = read_manifest(ObjectStore((run_uri,)), run_uri, "ingest")
    assert manifest.ledgers[0].key == join_uri(*path.parts[-3:])
    assert (manifest.tally_in.utterances, manifest.tally_out.utterances) == (6, 5)
    assert run_job("verify", *arguments[:4]).code == 0
    traced = run_job("inspect_object", *arguments[:4], "ann-2").out
    assert "quarantined" in traced
    assert "missing_object" in traced


def test_an_mp3_without_a_frame_count_is_declared_whole(kaldi_dir: Path, tmp_path: Path) -> None:
    """libsndfile alone would state a third of its length; extraction decodes all of it."""
    samples = np.random.default_rng(0).standard_normal(160_000) * 0.1
    path = kaldi_dir / "audio" / "ann-1.mp3"
    soundfile.write(path, samples, 16_000, bitrate_mode="VARIABLE", compression_level=0.5)
    data = path.read_bytes()
    path.write_bytes(data[data.index(data[:2], 2) :])
    assert soundfile.info(path).duration < 5
    table = (kaldi_dir / "wav.scp").read_text()
    (kaldi_dir / "wav.scp").write_text(table.replace("ann-1.flac", "ann-1.mp3"))
    corpus = tmp_path / "corpus"
    copied(kaldi_dir, corpus)
    (path,) = corpus.glob("metadata/labelled/*/*/*.jsonl")
    records = [record for _, record in read_records(path.read_bytes(), str(path))]
    (record,) = [each for each in records if each.utterance_id == "ann-1"]
    assert isinstance(record, Utterance)
    assert 10 < record.duration_s < 10.2
    decode_utterance((corpus / record.audio_uri).read_bytes(), "ann-1", record.duration_s)


TABLE_NAMES = (
    *("wav.scp", "text", "utt2spk", "utt2dur", "utt2time", "spk2locale", "utt2placement"),
    "labelled.speakers",
)


def test_any_damage_to_the_tables_is_rows_or_a_sentence(kaldi_dir: Path, tmp_path: Path) -> None:
    """Either a ValueError and no object, or a corpus whose every record selection reads."""
    random = np.random.default_rng(3)
    ids = [line.split()[0] for line in (kaldi_dir / "utt2spk").read_text().splitlines()]
    write(kaldi_dir, "utt2dur", [f"{key} 0.5" for key in ids])
    write(kaldi_dir, "utt2time", [f"{key} 2026-01-01T00:00:00+00:00" for key in ids])
    write(kaldi_dir, "spk2locale", [f"{key} en-US" for key in ("ann", "bob", "eve")])
    write(kaldi_dir, "utt2placement", [f"{key} DP1" for key in ids])
    whole = {name: (kaldi_dir / name).read_bytes() for name in TABLE_NAMES}
    outcomes = Counter[bool]()
    for number in range(NUM_DAMAGES):
        name = TABLE_NAMES[number % len(TABLE_NAMES)]
        data = bytearray(whole[name])
        for _ in range(1 + number % 3):
            where = random.integers(len(data) + 1)
            data[where : where + random.integers(3)] = bytes(
                random.integers(128, size=random.integers(3), dtype=np.uint8)
            )
        (kaldi_dir / name).write_bytes(data)
        corpus = tmp_path / f"{number}"
        try:
            found = copied(kaldi_dir, corpus)
        except ValueError:
            assert not corpus.exists()
            outcomes[False] += 1
        else:
            paths = corpus.glob("metadata/*/*/*/*.jsonl")
            read = [each for path in paths for _, each in read_records(path.read_bytes(), "")]
            assert all(isinstance(each, Utterance) for each in read)
            assert len(read) + len(found.plan.quarantined) + found.plan.statistics["unlisted"] == 6
            outcomes[True] += 1
        (kaldi_dir / name).write_bytes(whole[name])
    assert min(outcomes.values()) > NUM_DAMAGES / 5
