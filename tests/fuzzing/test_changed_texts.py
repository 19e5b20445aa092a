"""Changed recipes, cluster files, metadata and manifests of other tools name what is wrong."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.cluster import load_cluster
from infra.settings import read_record
from infra.store.object_store import ObjectStore
from jobs.planning.calibration import Calibration, json_object
from pipeline.metadata import read_ids, read_records
from pipeline.records import MetadataError, parse_line
from pipeline.steps.ingestion.kaldi import Kaldi, LibriSpeech
from pipeline.steps.ingestion.lhotse import Lhotse, Shar
from pipeline.steps.ingestion.manifest_format import FormatOptions, ManifestFormat
from pipeline.steps.ingestion.tables import CommonVoice, Nemo, Table
from tests.fuzzing.mutations import ODD_VALUES, changed, changed_json, damaged, repeated_key
from tests.fuzzing.outcomes import FUZZ, REFUSED, num_examples, outcome
from tests.jobs.planning.test_throughputs import CALIBRATION
from training.evaluate.language_model import LanguageModelFile
from training.settings.recipe import read_recipe

fewer = settings(FUZZ, max_examples=num_examples(60) // 3 + 1)

REPOSITORY = Path(__file__).parents[2]
FILES: Mapping[str, tuple[Callable[[str], Any], Path]] = {
    "recipe": (read_recipe, REPOSITORY / "tests" / "whole_path" / "tiny.toml"),
    "cluster": (load_cluster, REPOSITORY / "infra" / "clusters" / "realign.toml"),
}

ODD_TOML = ("nan", "inf", "-1", "1e400", "[]", "{}", '""', "1979-05-27", "9" * 400, "true")


@st.composite
def changed_toml(draw: st.DrawFn, text: str) -> bytes:
    """Damage the bytes, or give one to three lines' keys other values, names or repetitions."""
    if draw(st.booleans()):
        return draw(damaged(text.encode()))
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        key = lines[place].partition("=")[0]
        kind = draw(st.sampled_from(("value", "drop", "repeat", "deep", "key")))
        value = draw(st.sampled_from(ODD_TOML))
        lines[place] = {
            "value": f"{key}= {value}",
            "drop": "",
            "repeat": f"{lines[place]}\n{lines[place]}",
            "deep": f"{key}= " + "[" * 5000,
            "key": f"{'a.' * 3000}b = {value}",
        }[kind]
    return "\n".join(lines).encode(errors="replace")


@pytest.mark.parametrize("kind", FILES)
def test_changed_configurations(kind: str, tmp_path: Path) -> None:
    """A changed TOML file is a whole record, or is refused by its path."""
    read, path = FILES[kind]
    assert read(str(path)) is not None
    changed_file = tmp_path / path.name

    @fewer
    @given(changed_toml(path.read_text()))
    def check(found: bytes) -> None:
        changed_file.write_bytes(found)
        outcome(lambda: read(str(changed_file)), str(changed_file))

    check()


RECORD = {
    "utterance_id": "u1",
    "speaker_id": "s1",
    "duration_s": 1.5,
    "created_at": "2019-05-12T10:00:00+00:00",
    "locale": "en",
    "audio_uri": "a.flac",
    "text": "hello",
    "start_s": 0.5,
}


REASONS = {
    *("malformed_json", "missing_field", "wrong_type"),
    *("bad_field", "bad_duration", "bad_timestamp"),
}


def write(document: Any) -> bytes:
    return json.dumps(document).encode()


@FUZZ
@given(damaged(write(RECORD)) | repeated_key(write(RECORD)) | changed_json(RECORD, write))
def test_changed_metadata_lines(line: bytes) -> None:
    """A line is an utterance that can be written, or an error with its reason in the ledger."""
    found = outcome(lambda: parse_line(line))
    if found is not REFUSED:
        assert parse_line(found.to_json().encode()) == found
        return
    with pytest.raises(MetadataError) as refusal:
        parse_line(line)
    assert refusal.value.reason in REASONS


@FUZZ
@given(st.data())
def test_changed_metadata_objects(data: st.DataObject) -> None:
    """Every line of an object is a record or a ledger row; a damaged gzip is refused by its URI."""
    plain = b"".join(write({**RECORD, "utterance_id": f"u{n}"}) + b"\n" for n in range(3))
    packed = gzip.compress(plain, mtime=0)
    for uri, found in (
        ("s3://b/a.jsonl", data.draw(damaged(plain))),
        ("s3://b/a.jsonl.gz", data.draw(damaged(packed))),
    ):
        rows = outcome(lambda: list(read_records(found, uri)), uri)  # noqa: B023 - called at once
        outcome(lambda: list(read_ids(found, uri)), uri)  # noqa: B023 - called at once
        assert rows is REFUSED or all(num_bytes > 0 for num_bytes, _ in rows)


CUT = {
    "id": "c1",
    "start": 0,
    "duration": 1.5,
    "channel": 0,
    "type": "MonoCut",
    "supervisions": [{"id": "s", "speaker": "ann", "text": "hello", "language": "en"}],
    "recording": {
        "id": "r1",
        "duration": 1.5,
        "sources": [{"type": "file", "channels": [0], "source": "a.flac"}],
    },
}
SUPERVISION = {"id": "c1", "recording_id": "r1", "start": 0, "duration": 1.5, "speaker": "ann"}
NEMO = {"audio_filepath": "a.wav", "duration": 1.5, "text": "hello", "offset": 0.5}


def lines(*documents: Any) -> bytes:
    return b"".join(write(each) + b"\n" for each in documents)


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("c1.flac")
        member.size = 600
        archive.addfile(member, io.BytesIO(bytes(600)))
    return content.getvalue()


CSV = b"utterance_id,speaker_id,duration_s,created_at,locale,audio_uri\nu,s,1.5,2019,en,a.flac\n"
CLIPS = b"client_id\tpath\tsentence\tlocale\nc\ta.mp3\thello\ten\n"
FORMATS: Mapping[str, tuple[Callable[[str], ManifestFormat], str, Mapping[str, bytes]]] = {
    "json": (lambda _: Table(), "a.jsonl", {"a.jsonl": lines(RECORD)}),
    "csv": (lambda _: Table(), "a.csv", {"a.csv": CSV}),
    "csv.gz": (lambda _: Table(), "a.csv.gz", {"a.csv.gz": gzip.compress(CSV, mtime=0)}),
    "json.gz": (lambda _: Nemo(), "a.json.gz", {"a.json.gz": gzip.compress(lines(NEMO), mtime=0)}),
    "nemo": (lambda _: Nemo(), "a.json", {"a.json": lines(NEMO, NEMO)}),
    "lhotse cuts": (lambda _: Lhotse(), "a.jsonl", {"a.jsonl": lines(CUT)}),
    "lhotse supervisions": (
        lambda folder: Lhotse(FormatOptions(recordings_uri=f"{folder}/r.jsonl")),
        "a.jsonl",
        {"a.jsonl": lines(SUPERVISION), "r.jsonl": lines(CUT["recording"])},
    ),
    "shar": (
        lambda _: Shar(),
        "shar",
        {"shar/cuts.0.jsonl": lines(CUT), "shar/recording.0.tar": tar()},
    ),
    "kaldi": (
        lambda _: Kaldi(),
        "k",
        {
            "k/wav.scp": b"r1 a.wav\n",
            "k/segments": b"u1 r1 0.5 2.5\n",
            "k/utt2spk": b"u1 ann\n",
            "k/text": b"u1 hello\n",
            "k/utt2dur": b"u1 2.0\n",
        },
    ),
    "librispeech": (
        lambda _: LibriSpeech(),
        "l",
        {"l/1/2/1-2.trans.txt": b"1-2-0000 HELLO\n1-2-0001 THERE\n"},
    ),
    "common voice": (
        lambda _: CommonVoice(),
        "v/a.tsv",
        {"v/a.tsv": CLIPS, "v/clip_durations.tsv": b"clip\tduration[ms]\na.mp3\t1500\n"},
    ),
}


def records_in(store: ObjectStore, manifest: ManifestFormat, uri: str) -> Iterator[Any]:
    for piece in manifest.pieces(store, uri):
        yield from manifest.rows(store, piece)


@pytest.mark.parametrize("kind", FORMATS)
def test_changed_manifests_of_other_tools(kind: str, tmp_path: Path) -> None:
    """A changed row is a row, or one of the ledger; a damaged object is refused by its path."""
    make, name, files = FORMATS[kind]
    store, manifest = ObjectStore((str(tmp_path),)), make(str(tmp_path))
    for each, data in files.items():
        store.put(str(tmp_path / each), data)
    assert list(records_in(store, manifest, str(tmp_path / name)))

    @fewer
    @given(st.data())
    def check(data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(sorted(files)))
        ways = [damaged(files[each])]
        if each.endswith((".json", ".jsonl")):
            documents = [json.loads(line) for line in files[each].splitlines()]
            ways.append(changed(documents).map(_lines_of))
        store.put(str(tmp_path / each), data.draw(st.one_of(ways)))
        outcome(lambda: list(records_in(store, manifest, str(tmp_path / name))), str(tmp_path))
        store.put(str(tmp_path / each), files[each])

    check()


def _lines_of(documents: Any) -> bytes:
    try:
        return lines(*documents)
    except RecursionError:
        return b"[" * 99_999


@fewer
@given(row=st.data())
def test_changed_cells_of_parquet(
    row: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cells of other types, and text that is not UTF-8, are rows, or refused by the object."""
    folder = tmp_path_factory.getbasetemp()
    uri, store = str(folder / "a.parquet"), ObjectStore((str(folder),))
    cells = dict(RECORD)
    for _ in range(row.draw(st.integers(0, 3))):
        cells[row.draw(st.sampled_from(sorted(cells)))] = row.draw(st.sampled_from(ODD_VALUES))
    content = io.BytesIO()
    try:
        table = pa.table({name: [value] for name, value in cells.items()})
        if row.draw(st.booleans()):
            text = pa.array([b"\xff\xfe"]).view(pa.string())
            table = table.set_column(0, "utterance_id", text)
        pq.write_table(table, content)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return  # no such column
    store.put(uri, content.getvalue())
    outcome(lambda: list(records_in(store, Table(), uri)), uri)


MEASURED = json.dumps(asdict(CALIBRATION)).encode()


@fewer
@given(damaged(MEASURED) | changed_json(json.loads(MEASURED), write))
def test_changed_calibrations(data: bytes) -> None:
    """A calibration that `megahour plan` stored is read whole, or is refused by its place."""
    uri = "s3://b/run/plan/calibration.json"
    outcome(lambda: read_record(Calibration, json_object(data, uri), uri), uri)


ARPA = b"\\data\\\nngram 1=3\n\n\\1-grams:\n-1 <s> -0.3\n-1 </s>\n-0.5 hello\n\n\\end\\\n"


@FUZZ
@given(damaged(ARPA) | damaged(gzip.compress(ARPA, mtime=0)))
def test_changed_language_models(data: bytes) -> None:
    """A damaged language model is text of another model, or is refused by its URI."""
    outcome(LanguageModelFile("s3://b/model.arpa", data).arpa, "s3://b/model.arpa")
