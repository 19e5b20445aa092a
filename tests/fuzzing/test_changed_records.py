"""Changed manifests, commits, checkpoint records, job records, ledgers and indexes are refused.

Bytes that were damaged decode to the object that was written, or raise a ValueError. A document
that was changed and sealed again, as a forger would, decodes to another valid record, or raises.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.cli.job import parse_start_record
from jobs.cli.record import parse_job_record
from jobs.report_page.collect import CurvePoint
from pipeline.normalization import Moments
from pipeline.records import (
    Hypothesis,
    Member,
    Quarantined,
    Segment,
    Tally,
    hypotheses_from_text,
    hypotheses_to_text,
    part_from_text,
    part_to_text,
)
from pipeline.runs.commit import Commit
from pipeline.runs.engine import WITHOUT_LATTICE
from pipeline.runs.ledger import QUARANTINED, SELECTED, read_lines
from pipeline.runs.manifest import Manifest, Output, OutputPart, OutputsInParts
from pipeline.runs.sealed_json import NamedObject, named_objects, naming, read_sealed, seal
from pipeline.steps.hash_ranges import HashRange, utterances_of
from pipeline.steps.selection.id_index import IdRange
from pipeline.steps.selection.increment import Amount
from pipeline.steps.selection.subset_overlap import SPAN, SubsetRange
from tests.fuzzing.mutations import changed, changed_json, damaged, repeated_key
from tests.fuzzing.outcomes import FUZZ, REFUSED, outcome
from training.checkpoints.checkpointer import CheckpointRecord
from training.data.sub_epochs import Place
from training.decode.senones import parse_senone_tree
from training.evaluate.word_errors import (
    DecodedUtterance,
    DecodedWord,
    UtteranceErrors,
    WordErrors,
    read_decoded,
    read_errors,
    write_decoded,
    write_errors,
)
from training.settings.decoding import DecodingSettings

ANY = dict[str, Any]
SHARD = Output("features/x/ab/0-abcd.parquet", 9, "ab" * 32, 2, 1_800_000)
LEDGER = Output("features/x/ef/0-ef01.ledger.jsonl", 5, "ef" * 32, 1, 500, {"silent": 1})
PARTS = OutputsInParts([OutputPart("features/x/0.part", 8, "01" * 32, 3)], lambda _: b"")
MANIFEST = Manifest(
    "features/x",
    {"k": 20, "form": {"name": "lstm", "layers": [1, 2]}},
    {"selection/x": "0123"},
    (SHARD,),
    (LEDGER,),
    Tally(6, 1_802_000),
    Tally(2, 1_800_000),
    Tally(1, 500),
    Tally(3, 1500),
    {"mean": 0.25},
    versions={"numpy": "2.4"},
    id_index=(SHARD,),
)
COMMIT = Commit(
    "000001", "f" * 64, (SHARD,), LEDGER, Tally(3, 1_800_500), Tally(1, 500), versions={"a": "1"}
)
CHECKPOINT = CheckpointRecord("f" * 64, 12, (NamedObject("a.npz", 3, "a" * 64),))
COUNTS = {"utterances_in": 3, "utterances_out": 2, "quarantined": 1}
JOB_RECORD: dict[str, Any] = {
    "step": "realign",
    "finished_at": "2026-01-01T00:00:00+00:00",
    "seconds": 1.5,
    "task_seconds": 1.0,
    "recipe": {"k": 20},
    "manifests": {"alignments/labelled": COUNTS},
    "pace": {},
    "trainers": {},
    "requests": {"get": 1, "put": 2, "head": 3, "list": 4},
    "cluster": {"num_instances": 1, "price_per_instance_hour": 0.5},
    "device_faults": [],
    "machine": "a machine",
    "commit": "8140d000f00d",
}
STARTED: dict[str, Any] = {
    "step": "realign",
    "started_at": "2026-01-01T00:00:00+00:00",
    "hours_before": {"alignments/labelled": 0.5},
    "recipe": {"k": 20},
}
SEALED: Mapping[str, tuple[Callable[[bytes], Any], bytes]] = {
    "manifest": (Manifest.from_bytes, MANIFEST.to_bytes()),
    "manifest in parts": (Manifest.from_bytes, replace(MANIFEST, outputs=PARTS).to_bytes()),
    "commit": (Commit.from_bytes, COMMIT.to_bytes()),
    "checkpoint": (
        lambda data: read_sealed(data, "again", CheckpointRecord.from_document),
        CHECKPOINT.to_bytes(),
    ),
    "checkpoint of a run": (
        lambda data: read_sealed(data, "again", CheckpointRecord.from_document),
        replace(CHECKPOINT, place=Place(3, 0.25, {"cross_entropy": 1.5})).to_bytes(),
    ),
    "job record": (lambda data: parse_job_record(data, "again"), seal(JOB_RECORD)),
    "start record": (parse_start_record, seal(STARTED)),
    "named objects": (
        lambda data: read_sealed(data, "again", named_objects),
        seal(naming({"a": 1}, [NamedObject("k", 1, "c" * 64)])),
    ),
}
POINT = {"labelled": True, "learning_rate": 0.1, "num_frames": 9, "cross_entropy": 1.5} | {
    "frame_accuracy": 0.5,
    "trainer": {"bytes_sent": 8},
}
LEFT_OUT = {"utterances": 2, "duration_ms": 3000, "hours": 0.000833}
SETTINGS = {"acoustic_scale": 0.5, "ngram_order": 2}
STATISTICS: Mapping[str, tuple[Any, Callable[[Manifest], Any]]] = {
    "moments": (
        {"count": 2, "sum": [1.0, 2.0], "sum_of_squares": [1.0, 4.0]},
        lambda found: Moments.from_dict(found.statistic("moments", dict[str, Any])),
    ),
    "senone_tree": (
        json.dumps({"phones": ["a", "b"], "roots": [0, 1]}),
        lambda found: parse_senone_tree(found.statistic("senone_tree", str)),
    ),
    "lda_mllt": ([[0.5, 1.0]], lambda found: found.statistic("lda_mllt", list[list[float]])),
    "senone_counts": ([3, 1], lambda found: found.statistic("senone_counts", list[int])),
    "settings": (SETTINGS, lambda found: DecodingSettings.of(found.statistic("settings", ANY))),
    "metadata_bytes": (
        {"date=2026-01-01/speaker_bucket=00/a.jsonl": 12},
        lambda found: found.statistic("metadata_bytes", dict[str, int]),
    ),
    "curve": ([POINT], lambda found: found.statistic("curve", list[CurvePoint])),
    "unselected": (
        {"locale": LEFT_OUT},
        lambda found: found.statistic("unselected", dict[str, Amount]),
    ),
    "without_lattice": (
        {"no_path": 2},
        lambda found: found.statistic(WITHOUT_LATTICE, dict[str, int]),
    ),
}
"""Statistics of manifests that later steps read, and how they read them."""
every_sealed = pytest.mark.parametrize("kind", SEALED)


@every_sealed
def test_damaged_sealed_records(kind: str) -> None:
    """A damaged record is refused, with a remedy, or is what was written."""
    decode, data = SEALED[kind]
    written = decode(data)

    @FUZZ
    @given(damaged(data) | repeated_key(data))
    def check(found: bytes) -> None:
        assert outcome(lambda: decode(found), "again") in (REFUSED, written)

    check()


@every_sealed
def test_forged_sealed_records(kind: str) -> None:
    """A changed record with the right digest is refused, or is a record that can be written."""
    decode, data = SEALED[kind]
    document = {name: each for name, each in json.loads(data).items() if name != "sha256"}

    @FUZZ
    @given(changed_json(document, seal))
    def check(found: bytes) -> None:
        read = outcome(lambda: decode(found))
        if isinstance(read, Manifest | Commit | CheckpointRecord):
            read.to_bytes()
        if isinstance(read, Manifest):
            assert read.tally_in.hours >= 0

    check()


@pytest.mark.parametrize("name", STATISTICS)
def test_forged_statistics(name: str) -> None:
    """A later step checks the statistics that it reads of a manifest, and names a bad one."""
    written, read = STATISTICS[name]
    document = {"statistics": {name: written}}
    assert read(replace(MANIFEST, **document))

    @FUZZ
    @given(changed(document))
    def check(found: Any) -> None:
        statistics = found.get("statistics")
        if isinstance(statistics, dict):  # test_forged_sealed_records has others
            outcome(lambda: read(replace(MANIFEST, statistics=statistics)))

    check()


@pytest.mark.parametrize(
    ("kind", "value", "need"),
    [
        (int, True, "n = True: need a whole number from 0"),
        (list[int], [1, -1], "n = [1, -1]: need a list, each a whole number from 0"),
        (dict[str, float], {"a": "b"}, "need an object, each value a finite number"),
        (dict[str, dict[str, Any]], {"a": 1}, "each value an object, each value any value"),
        (
            Amount,
            {"utterances": 1},
            "an object with utterances: a whole number from 0, duration_ms",
        ),
        (
            Amount,
            {"utterances": 1, "duration_ms": "2"},
            "n = {'duration_ms': '2', 'utterances': 1}",
        ),
        (
            list[CurvePoint],
            [{**POINT, "trainer": {"density": "a"}}],
            "perhaps trainer: an object, each",
        ),
    ],
)
def test_a_statistic_of_another_kind_is_named(kind: Any, value: Any, need: str) -> None:
    """The message names step, statistic, value and need; so it does where there is none."""
    other = replace(MANIFEST, statistics={"n": value})
    with pytest.raises(ValueError, match=re.escape(need)) as refused:
        other.statistic("n", kind)
    assert str(refused.value).startswith("the manifest of features/x: statistics: n")
    with pytest.raises(ValueError, match=r"statistics: no m: need .*in a new --run"):
        other.statistic("m", kind)
    assert replace(MANIFEST, statistics={"n": [1, 2]}).statistic("n", list[int]) == [1, 2]
    assert other.statistic("m", int, 0) == 0


def test_empty_and_absent_records() -> None:
    """No byte, another JSON value, no digest and other bytes are refused."""
    for decode, _ in SEALED.values():
        for data in (b"", b"null", b"[]", b"{}", b'"sha256"', b"\xff\xfe", b"1e999"):
            assert outcome(lambda: decode(data), "again") is REFUSED  # noqa: B023 - called at once


def output_lines(data: bytes) -> Any:
    count = len(data.splitlines())
    return list(OutputsInParts([OutputPart("p", len(data), "a", count)], lambda _: data))


def array_of(cls: type) -> Callable[[bytes], Any]:
    return lambda data: cls.from_bytes(data).to_bytes()  # type: ignore[attr-defined]


ROW = Quarantined("utt-1", "s3://bucket/a.flac", "silent", "rms", 12, 500)
SELECTION = {"utterance_id": "u", "speaker_id": "s", "duration_s": 1.5}
WORDS = (DecodedWord("hello", 10, 200, 0.5),)
DECODED = DecodedUtterance("u", "s", "DP1", 100, ("hello",), WORDS, False, 3, 2, (1, 2))
ERRORS = UtteranceErrors("u", "s", "DP1", 10, {"student": WordErrors(1, 0, 2, 5)})
SPLIT = {"side": "left", "phones": [0, 1], "inside": 0, "outside": 1}
LINES: Mapping[str, tuple[Callable[[bytes], Any], bytes]] = {
    "manifest part": (output_lines, SHARD.to_line()),
    "ledger row": (lambda data: list(read_lines(data, QUARANTINED)), ROW.to_json().encode()),
    "selection": (lambda data: list(read_lines(data, SELECTED)), json.dumps(SELECTION).encode()),
    "decoded": (read_decoded, write_decoded([DECODED])),
    "word errors": (read_errors, write_errors([ERRORS])),
    "senone tree": (
        lambda data: parse_senone_tree(data.decode(errors="replace")),
        json.dumps({"phones": ["a", "b"], "roots": [SPLIT, 2]}).encode(),
    ),
    "segment": (
        lambda data: part_from_text(data.decode(errors="replace")),
        str(part_to_text(Segment(1.5, 2.0))).encode(),
    ),
    "member": (
        lambda data: part_from_text(data.decode(errors="replace")),
        str(part_to_text(Member(512, 1000))).encode(),
    ),
    "hypotheses": (
        lambda data: hypotheses_from_text(data.decode(errors="replace")),
        str(hypotheses_to_text([Hypothesis("whisper", "Yes.", -0.5)])).encode(),
    ),
}
every_line = pytest.mark.parametrize("kind", LINES)


@every_line
def test_changed_lines(kind: str) -> None:
    """A changed line of JSON is another record, or is refused and quoted."""
    decode, data = LINES[kind]
    assert decode(data)

    def write(document: Any) -> bytes:
        return json.dumps(document).encode()

    @FUZZ
    @given(damaged(data) | repeated_key(data) | changed_json(json.loads(data), write))
    def check(found: bytes) -> None:
        outcome(lambda: decode(found))

    check()


HASHES = np.arange(5, dtype=np.uint64)
HASH_RANGE = HashRange(utterances_of(HASHES, np.arange(5)), HASHES)
ARRAYS = {
    "hash range": (HashRange, HASH_RANGE.to_bytes()),
    "range of a subset": (SubsetRange, SubsetRange(HASH_RANGE, np.zeros(5, SPAN)).to_bytes()),
    "id index": (IdRange, IdRange(HASHES, np.arange(5, dtype=np.uint32)).to_bytes()),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_changed_arrays_of_hashes(kind: str) -> None:
    """An index of the size that it states is read to the bit; another size is refused by it."""
    cls, data = ARRAYS[kind]

    @FUZZ
    @given(damaged(data) | st.binary(max_size=64))
    def check(found: bytes) -> None:
        read = outcome(lambda: array_of(cls)(found), "bytes")
        assert read is REFUSED or read == found

    check()


@pytest.mark.parametrize(
    ("table", "name"), [("", "seconds"), ("cluster", "price_per_instance_hour")]
)
def test_no_number_of_a_job_record_is_below_zero(table: str, name: str) -> None:
    """Status and report compute rates and dollars of them."""
    below = {name: -0.5}
    record = {**JOB_RECORD, **({table: {**JOB_RECORD[table], **below}} if table else below)}
    with pytest.raises(ValueError, match=f"{name} = -0.5: need a number from 0"):
        parse_job_record(seal(record), "again")
