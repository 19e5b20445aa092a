"""A manifest of which no row can be used is refused before any task, by its cause and a remedy."""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from tests.jobs.ingestion.manifest_corpus import Corpus, write_lines

pytestmark = pytest.mark.usefixtures("without_spark")

RECORDING = {
    "id": "r",
    "sources": [{"type": "file", "channels": [0], "source": "audio/a.wav"}],
    "sampling_rate": 16_000,
    "num_samples": 16_000,
    "duration": 1.0,
}
SUPERVISION = {"id": "s", "recording_id": "r", "start": 0, "duration": 1.0, "text": "yes"}
CUT = {"id": "c", "start": 0, "duration": 1.0, "channel": 0, "type": "MonoCut"}
CUT |= {"supervisions": [SUPERVISION], "recording": RECORDING}
NEMO = {"audio_filepath": "audio/a.wav", "duration": 1.0, "text": "yes"}
VOICE = "client_id\tpath\tsentence\nann\ta.mp3\tyes\n"


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def nemo(audio: str, **more: object) -> str:
    return lines({**NEMO, "audio_filepath": audio, **more})


@pytest.fixture
def refusal(corpus: Corpus) -> Callable[..., str]:
    """Return a function that ingests what it writes, beside audio/a.wav, and returns the error."""
    (corpus.audio / "a.wav").touch()

    def refused(files: Mapping[str, str | bytes], uri: str, *options: str) -> str:
        for name, content in files.items():
            path = corpus.audio.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        given = uri if "://" in uri else f"{corpus.audio.parent}/{uri}"
        said = corpus.job("ingest", "--manifest", f"labelled={given}", *options)
        assert said.code != 0
        assert "Traceback" not in said.err
        return str(said.err).splitlines()[-1]

    return refused


def form(name: str) -> tuple[str, str]:
    return "--format", name


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (lines(CUT), (), "looks like lhotse's cuts: give --format lhotse"),
        (lines({"id": "m", "tracks": []}), (), "lhotse's mixtures of cuts: give --format lhotse"),
        (lines(SUPERVISION), (), "lhotse's supervisions: give --format lhotse, and their recordi"),
        (lines(SUPERVISION), form("lhotse"), "lhotse's supervisions: give --format lhotse, and th"),
        (lines(RECORDING), form("lhotse"), "lhotse's recordings, which name no utterance: give"),
        (lines(NEMO), form("lhotse"), "looks like NeMo's: give --format nemo"),
        (lines(NEMO), form("table"), "looks like NeMo's: give --format nemo"),
        (VOICE, (), "looks like a table of Common Voice: give --format common_voice"),
        (VOICE, form("table"), "looks like a table of Common Voice: give --format common_voice"),
        (json.dumps([NEMO, NEMO]), (), "holds a JSON array: need JSON lines: write an object a l"),
        (json.dumps([NEMO], indent=1), (), "holds a JSON array: need JSON lines"),
        (json.dumps(NEMO, indent=1), (), "holds JSON over lines: need JSON lines: write an objec"),
        (
            "a,b\n1,2\n",
            (),
            "holds a table of text with the columns a, b: need JSON lines: give --fo",
        ),
        ("a,b\n1,2\n", form("table"), "holds a table of text: call it by a name in .csv or .tsv"),
        ("a,b\n1,2\n", form("common_voice"), "path is absent; found"),
        (lines({**CUT, "speed": 2}), (), "looks like lhotse's cuts: give --format lhotse"),
        (lines({**CUT, "speed": 2}), form("lhotse"), "'speed': not known, so not used: rename it"),
        (lines(NEMO, NEMO), form("common_voice"), "looks like NeMo's: give --format nemo"),
        (
            gzip.compress(lines(NEMO).encode(), mtime=0),
            (),
            "is in gzip: call it by a name with .gz",
        ),
        ("", (), "no row: name a manifest that lists audio"),
        ("\n\n", (), "no row: name a manifest that lists audio"),
        (b"RIFF\0\0\0\0WAVE", (), "holds an audio file: need JSON lines: name a manifest that li"),
        (lines(NEMO).encode("utf-16"), (), "holds UTF-16: need JSON lines: write it as UTF-8"),
        ("a audio/a.wav\n", (), "holds text: need JSON lines"),
        (lines({"tarred_audio_filepaths": "x"}), (), "looks like NeMo's tarred data set: its mem"),
    ],
)
def test_another_content_than_the_format_s(
    refusal: Callable[..., str], content: str | bytes, options: Sequence[str], said: str
) -> None:
    """The message says what the manifest looks like, and which option or change it needs."""
    assert said in refusal({"m.jsonl": content}, "m.jsonl", *options)


@pytest.mark.parametrize(
    ("files", "uri", "options", "said"),
    [
        (
            {"nl/train.tsv": VOICE, "nl/dev.tsv": VOICE, "nl/clips/a.mp3": ""},
            "nl",
            form("common_voice"),
            "nl holds 2 tables: name one of them, such as ",
        ),
        ({"k/wav.scp": "a a.wav\n"}, "k", (), "looks like Kaldi's: give --format kaldi and the f"),
        ({"k/wav.scp": "a a.wav\n"}, "k/wav.scp", (), "looks like Kaldi's: give --format kaldi"),
        ({"k/wav.scp": "a a.wav\n"}, "k/wav.scp", form("kaldi"), "give --format kaldi and the fol"),
        ({"k/feats.scp": "a x.ark:1\n"}, "k", form("kaldi"), "looks like Kaldi's archives, or a l"),
        ({"k/wav.scp": "a x.ark:123\n"}, "k", form("kaldi"), "an entry of a Kaldi archive is not"),
        ({"l/1/2/1-2.trans.txt": "1-2-0 A\n"}, "l", (), "looks like LibriSpeech's: give --format"),
        (
            {
                "s/cuts.000000.jsonl.gz": gzip.compress(lines(CUT).encode()),
                "s/recording.000000.tar": "",
            },
            "s",
            form("kaldi"),
            "looks like lhotse's Shar: give --format shar",
        ),
        (
            {"k/wav.scp": "a a.wav\n", "k/feats.scp": "a x.ark:1\n", "k/utt2mood": "a x\n"},
            "k",
            form("kaldi"),
            "k: utt2mood: a table that is not known: move it out",
        ),
        ({"e/readme.md": "x"}, "e", (), "e holds none of *.jsonl, "),
        ({"t/data.arrow": "x"}, "t", form("table"), "t holds none of *.jsonl, "),
        ({}, "m__OP_0..7_CL_.json", (), "looks like NeMo's tarred data set: its members are not"),
        (
            {},
            "https://host/m.jsonl",
            (),
            "unknown scheme https://, need s3://bucket/key or a local path: do",
        ),
        ({}, "absent.jsonl", (), "absent.jsonl: no such object: check the path"),
        ({"m.jsonl.gz": lines(NEMO)}, "m.jsonl.gz", (), "is no gzip, but its name ends in .gz"),
    ],
)
def test_another_object_or_folder_than_the_format_s(
    refusal: Callable[..., str],
    files: Mapping[str, str | bytes],
    uri: str,
    options: Sequence[str],
    said: str,
) -> None:
    """A folder in place of a table, a table in place of its folder, and others' folders."""
    assert said in refusal(files, uri, *options)


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ((), "audio_filepath"),
        (form("table"), "audio_uri"),
        ((*form("table"), "--columns", "audio_uri=sound"), "sound"),
    ],
)
def test_a_column_that_is_absent(
    refusal: Callable[..., str], options: Sequence[str], absent: str
) -> None:
    """It is named as the manifest would, beside those that are there."""
    said = refusal({"m.jsonl": lines({"path": "audio/a.wav", "text": "yes"})}, "m.jsonl", *options)
    assert f"{absent} is absent; found path, text: rename a column, or give " in said
    assert "--columns audio_uri=COLUMN" in said


def test_a_transcript_that_is_absent(refusal: Callable[..., str]) -> None:
    """Labelled speech needs text, by the name that the user has given to it."""
    options = (*form("table"), "--columns", "audio_uri=path,text=words")
    said = refusal({"m.csv": "path,sentence\naudio/a.wav,yes\n"}, "m.csv", *options)
    assert "words is absent: labelled needs it; found path, sentence: rename a column" in said


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        ("~/a.wav", "'~/a.wav': ~ is for a shell to expand: write the whole path"),
        ("C:\\audio\\a.wav", "a path of Windows: need the path by which this host reaches the fi"),
        ("C:/audio/a.wav", "a path of Windows: need the path by which this host"),
        ("audio\\a.wav", "need / in place of \\: write 'audio/a.wav'"),
        ("audio%2Fa.wav", "paths are read without decoding %: write 'audio/a.wav'"),
        (
            "https://host/a.wav",
            "unknown scheme https://, need s3://bucket/key or a local path: download it",
        ),
        (
            "s3a://bucket/a.wav",
            "unknown scheme s3a://, need s3://bucket/key or a local path: write",
        ),
        ("file://host/a.wav", "need file:///absolute/path, without a host"),
        ("../audio/a.wav", "'.' and '..' are refused: write the path without them"),
        ("x.ark:123", "x.ark:123: an entry of a Kaldi archive is not read: name files"),
        ("a.wav", "'a.wav' is relative to"),
    ],
)
def test_audio_that_cannot_be_there(refusal: Callable[..., str], audio: str, said: str) -> None:
    """A path of another system, of another tool, or relative to another folder."""
    assert said in refusal({"m.jsonl": nemo(audio)}, "m.jsonl")


@pytest.mark.parametrize("options", [(), ("--ignore-columns", "shard_id")])
def test_members_of_tars(refusal: Callable[..., str], options: Sequence[str]) -> None:
    """The key that a shard's rows have says so, also where it is passed over."""
    said = refusal({"m.jsonl": nemo("u.wav", shard_id=0)}, "m.jsonl", *options)
    assert "shard_id is of NeMo's tarred data set: its members are not read: unpack" in said


@pytest.mark.parametrize("place", ["cwd", "prefix"])
def test_paths_that_are_relative_to_another_folder(
    refusal: Callable[..., str],
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    place: str,
) -> None:
    """The message says from where they would be there."""
    folder = corpus.audio if place == "prefix" else tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    (folder / "b.wav").touch()
    monkeypatch.chdir(folder if place == "cwd" else "/")
    said = refusal({"lists/m.jsonl": nemo("b.wav")}, "lists/m.jsonl")
    where = f"'b.wav' is relative to {corpus.audio.parent}/lists; it is at {folder}/b.wav: "
    assert f"{where}put the manifest into {folder}, or write whole paths" in said


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_links_to_another_folder(refusal: Callable[..., str], tmp_path: Path, linked: str) -> None:
    """The message names the link and the folder that would have to be a prefix."""
    speech = tmp_path / "speech"
    speech.mkdir()
    (speech / "b.wav").touch()
    name = "b" if linked == "folder" else "b.wav"
    link = tmp_path / "audio" / name
    link.symlink_to(speech if linked == "folder" else speech / "b.wav")
    audio = f"audio/{name}/b.wav" if linked == "folder" else f"audio/{name}"
    said = refusal({"m.jsonl": nemo(audio)}, "m.jsonl")
    assert f"{link} is a link to {speech}" in said
    folder = "that folder" if linked == "folder" else "that file's folder"
    assert f"allow {folder}: add it to corpus.audio_prefixes" in said


def test_one_good_row_is_enough(corpus: Corpus) -> None:
    """Others become rows of the ledger, or are found to be absent by extraction."""
    (corpus.audio / "a.wav").touch()
    rows: list[Any] = [{"duration": 1.0}, {**NEMO, "audio_filepath": "audio/b.wav"}, NEMO, "none"]
    manifest = corpus.ingest("--manifest", write_lines(corpus.audio.parent / "m.jsonl", rows))
    assert manifest.tally_out.utterances == 2
    assert corpus.ledger()[0]["detail"] == "audio_filepath is absent"


def test_faulty_values_alone_are_the_ledgers(refusal: Callable[..., str]) -> None:
    """No cause is common to them: they are ingested as rows, and the loss budget decides."""
    said = refusal({"m.jsonl": nemo("audio/a.wav", duration=-1) + "{"}, "m.jsonl")
    assert "2 of 2 utterances quarantined" in said


def test_ledger_rows_call_a_field_as_the_manifest_does(corpus: Corpus) -> None:
    """A value that is refused is found by its column."""
    (corpus.audio / "a.wav").touch()
    rows: list[Any] = [NEMO, {**NEMO, "duration": -1}, {**NEMO, "speaker": "a\0b"}]
    corpus.ingest("--manifest", write_lines(corpus.audio.parent / "m.jsonl", rows))
    details = [row["detail"].partition(":")[0] for row in corpus.ledger()]
    assert details == ["duration = -1", "speaker = 'a\\x00b'"]


def test_parquet_is_a_table(refusal: Callable[..., str], tmp_path: Path) -> None:
    """By its name or another."""
    pq.write_table(pa.table({"path": ["audio/a.wav"]}), tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    said = refusal({"m.json": data}, "m.json")
    assert "holds Parquet: need JSON lines: give --format table" in said
    said = refusal({"m.json": data}, "m.json", *form("table"))
    assert "holds Parquet: call it by a name in .parquet" in said
    said = refusal({"m.parquet": data}, "m.parquet", *form("table"))
    assert "audio_uri is absent; found path: rename a column, or give --columns audio_uri" in said


@pytest.mark.parametrize("keys", [["client_id", "path", "sentence"], ["audio_filepath", "text"]])
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_no_format_is_named_that_could_not_read_the_object(
    refusal: Callable[..., str], tmp_path: Path, keys: Sequence[str], suffix: str
) -> None:
    """A table with the columns of NeMo or Common Voice is theirs only in their form."""
    table = pa.table({key: ["x"] for key in keys})
    write = pq.write_table if suffix == ".parquet" else csv.write_csv
    write(table, tmp_path / "x")
    said = refusal({f"m{suffix}": (tmp_path / "x").read_bytes()}, f"m{suffix}", *form("table"))
    is_voice = (keys[0], suffix) == ("client_id", ".csv")
    assert ("looks like a table of Common Voice" if is_voice else "audio_uri is absent") in said


def test_audio_that_is_no_path(refusal: Callable[..., str]) -> None:
    """As where a data set holds the bytes; the column is named, and not the id made of it."""
    rows = lines({"audio": {"path": "audio/a.wav", "bytes": None}, "text": "yes"})
    said = refusal({"m.jsonl": rows}, "m.jsonl", *form("table"), "--columns", "audio_uri=audio")
    assert "audio = {'bytes': None, 'path': 'audio/a.wav'}: need text" in said
