"""What recognizers heard is joined with utterances, from manifests and from lines of its own."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.records import Hypothesis
from pipeline.steps.ingestion import transcripts
from tests.job_programs import RunJob
from tests.jobs.ingestion.manifest_corpus import Corpus, row, write_lines
from tests.small_corpus import tone, wav

pytestmark = pytest.mark.usefixtures("without_spark")

IDS = ("ann-1", "ann-2", "bob-1")
WHISPER = {
    "ann-1": Hypothesis("whisper", "Hello, 2 worlds.", -0.25),
    "bob-1": Hypothesis("whisper", "\u201cHi.\u201d"),
}


@pytest.fixture
def spoken(corpus: Corpus) -> Corpus:
    for name in IDS:
        (corpus.audio / f"{name}.wav").write_bytes(wav(tone(1, 1)))
    return corpus


def manifest(corpus: Corpus, **more: Any) -> str:
    rows = [row(f"{name}.wav", 1.0, **more) for name in IDS]
    return write_lines(corpus.audio.parent / "m.jsonl", rows)


def heard(corpus: Corpus) -> dict[str, tuple[Hypothesis, ...]]:
    return {each.utterance_id: each.hypotheses for each in corpus.records()}


def test_lines_are_joined_by_ids_and_paths(spoken: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few records are joined at a time; other lines and fields are passed over."""
    monkeypatch.setattr(transcripts, "JOINED_RECORDS", 2)
    lines = [
        {"utterance_id": "ann-1", "pred_text": WHISPER["ann-1"].text, "score": -0.25, "no": [1]},
        {"audio_filepath": "audio/bob-1.wav", "pred_text": WHISPER["bob-1"].text},
        {"audio_filepath": "audio/ann-2.wav", "text": "A REFERENCE"},
        {"utterance_id": "zoe-1", "pred_text": "nobody"},
        {"pred_text": "of nothing"},
    ]
    at = write_lines(spoken.audio.parent / "whisper.jsonl.gz", lines)
    other = write_lines(
        spoken.audio.parent / "b.jsonl", [{"utterance_id": "ann-1", "pred_text": ""}]
    )
    given = ("--transcripts", f"whisper={at}", "--transcripts", f"b={other}")
    made = spoken.ingest("--manifest", manifest(spoken), "--format", "table", *given)
    assert heard(spoken) == {
        "ann-1": (WHISPER["ann-1"], Hypothesis("b", "")),
        "ann-2": (),
        "bob-1": (WHISPER["bob-1"],),
    }
    assert made.statistics["hypotheses"] == {"b": 1, "whisper": 2}
    assert made.config["transcripts"] == [f"whisper={at}", f"b={other}"]
    assert at in made.inputs


def test_kaldis_text_has_ids_and_words(spoken: Corpus) -> None:
    """One of no word is of an utterance in which the recognizer heard nothing."""
    at = spoken.audio.parent / "text.gz"
    at.write_bytes(gzip.compress("\ufeffann-1  Hello\tthere \n\nbob-1\r\nzoe-1 a".encode()))
    spoken.ingest("--manifest", manifest(spoken), "--format", "table", "--transcripts", f"w={at}")
    assert heard(spoken) == {
        "ann-1": (Hypothesis("w", "Hello\tthere"),),
        "ann-2": (),
        "bob-1": (Hypothesis("w", ""),),
    }


def test_a_path_is_of_no_segment(spoken: Corpus) -> None:
    """One text of a recording is not that of each of its segments."""
    rows = [row("ann-1.wav", 0.5, start_s=0.1), row("bob-1.wav", 1.0)]
    at = write_lines(
        spoken.audio.parent / "w.jsonl",
        [{"audio_filepath": f"audio/{name}.wav", "pred_text": name} for name in IDS],
    )
    path = write_lines(spoken.audio.parent / "m.jsonl", rows)
    spoken.ingest("--manifest", path, "--format", "table", "--transcripts", f"w={at}")
    assert heard(spoken) == {"ann-1": (), "bob-1": (Hypothesis("w", "bob-1"),)}


def test_a_line_is_known_by_its_id_or_its_audio(corpus: Corpus) -> None:
    """By a path in any spelling, whatever id the recognizer gave; a segment by its offset."""
    names = ("caf\u00e9", "long", "bob")
    for name in names:
        (corpus.audio / f"{name}.wav").write_bytes(wav(tone(1, 1)))
    rows = [row(f"{name}.wav", 1.0) for name in names if name != "long"]
    rows += [
        row("long.wav", 0.25, start_s=start, utterance_id=f"s{start}") for start in (0, 0.25, 0.5)
    ]
    lines: list[object] = [
        {"audio_filepath": "audio/long.wav", "offset": 0.0, "pred_text": "first"},
        {"utterance_id": "rec-1", "audio_filepath": "./audio//cafe\u0301.wav", "pred_text": "a"},
        {"audio_filepath": "audio/long.wav", "offset": "0.5", "pred_text": "second"},
        *[{"utterance_id": "bob", "audio_filepath": "audio/bob.wav", "pred_text": "b"}] * 2,
    ]
    at = write_lines(corpus.audio.parent / "w.jsonl", lines)
    manifest = write_lines(corpus.audio.parent / "m.jsonl", rows)
    given = ("--manifest", manifest, "--format", "table", "--transcripts", f"w={at}")
    said = corpus.job("ingest", *given)
    assert "w heard 4 of 5 utterances" in said.err
    texts = {key: [each.text for each in some] for key, some in heard(corpus).items()}
    assert texts == {
        "caf\u00e9": ["a"],
        "s0": ["first"],
        "s0.25": [],
        "s0.5": ["second"],
        "bob": ["b"],
    }


@pytest.mark.parametrize(
    ("path", "folder", "place"),
    [
        ("./a/b.wav", "s3://bucket/day", "s3://bucket/day/a/b.wav"),
        ("s3://bucket/a//b.wav", "/data", "s3://bucket/a//b.wav"),
        ("file:///data/b.wav", "/other", "/data/b.wav"),
        ("../b.wav", "/data/day", "/data/b.wav"),
    ],
)
def test_a_place_is_its_uri(path: str, folder: str, place: str) -> None:
    """Relative paths begin in the lines' folder; S3's keys stay as they are."""
    fields = {"audio_filepath": path}
    where = transcripts._place(fields, folder)
    assert list(transcripts._keys(fields, *where)) == [("place", place)]
    assert transcripts.place_key(place) == ("place", place)


def test_manifests_carry_a_recognizers_text(spoken: Corpus) -> None:
    """In NeMo's fields, or in columns by other names; the text of unlabelled speech is dropped."""
    rows = [
        {"audio_filepath": f"audio/{name}.wav", "duration": 1, "text": "no", "pred_text": name}
        for name in IDS
    ]
    spoken.ingest("--manifest", write_lines(spoken.audio.parent / "nemo.jsonl", rows))
    assert [each.text for each in spoken.records()] == [None] * 3
    texts = {each.text for found in heard(spoken).values() for each in found}
    assert texts == {*IDS}


def test_lhotses_custom_fields_carry_a_recognizers_text(spoken: Corpus) -> None:
    """A cut's, or its supervisions', which are within it; their score is the mean over words."""

    def cut(name: str, custom: object, *of_supervisions: object) -> dict[str, Any]:
        source = {"type": "file", "channels": [0], "source": f"audio/{name}.wav"}
        times = {"start": 0, "duration": 1.0}
        supervisions = [
            {"id": f"{name}-{n}", "recording_id": name, **times, "channel": 0, "custom": each}
            for n, each in enumerate(of_supervisions)
        ]
        recording = {"id": name, "sources": [source], "duration": 1.0}
        made = {"id": name, "type": "MonoCut", **times, "channel": 0, "recording": recording}
        return {**made, "supervisions": supervisions, "custom": custom}

    late = cut("ann-3", None, {"pred_text": "not all here"})
    late["supervisions"][0]["duration"] = 2.0
    no_text = cut("bob-2", None, {"pred_text": ["a"]}, {"pred_text": "b"})
    no_score = cut("bob-3", None, {"pred_text": "a", "score": "-1"}, {"pred_text": "b"})
    rows = [
        *(late, no_text, no_score),
        cut("ann-1", {"pred_text": "Hi.", "score": -0.5, "snr": 3}),
        cut("ann-2", {"snr": 3}, {"pred_text": "Yes."}, None),
        cut("bob-1", None, {"pred_text": "a", "score": -1}, {"pred_text": "b c", "score": -0.25}),
    ]
    path = write_lines(spoken.audio.parent / "cuts.jsonl", rows)
    spoken.ingest("--manifest", path, "--format", "lhotse")
    assert heard(spoken) == {
        "ann-1": (Hypothesis("pred_text", "Hi.", -0.5),),
        "ann-2": (Hypothesis("pred_text", "Yes."),),
        "bob-1": (Hypothesis("pred_text", "a b c", -0.5),),
    }
    details = {each["utterance_id"]: each["detail"] for each in spoken.ledger()}
    assert "not all spoken there" in details["ann-3"]
    assert "text = ['a']: need text" in details["bob-2"]
    assert "score = '-1': need a finite number" in details["bob-3"]


def test_columns_name_a_recognizers_text(spoken: Corpus) -> None:
    """A score in a table of text is a number."""
    path = spoken.audio.parent / "calls.csv"
    path.write_text("file,heard,sure\naudio/ann-1.wav,Hello,-0.5\n")
    columns = "audio_uri=file,pred_text=heard,score=sure"
    spoken.ingest("--manifest", str(path), "--format", "table", "--columns", columns)
    assert list(heard(spoken).values()) == [(Hypothesis("pred_text", "Hello", -0.5),)]


def test_a_version_has_what_was_heard(spoken: Corpus) -> None:
    """The text is of the utterance, in whichever placement it sounds."""
    at = write_lines(spoken.audio.parent / "w.jsonl", [{"utterance_id": "ann-1", "pred_text": "a"}])
    given = ("--transcripts", f"w={at}", "--placements", "clean")
    spoken.ingest("--manifest", manifest(spoken), "--format", "table", *given)
    found = heard(spoken)
    assert found["ann-1-clean"] == (Hypothesis("w", "a"),)
    assert found["bob-1-clean"] == ()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"utterance_id": "ann-1", "pred_text": "a"'], "row 1: .*correct the line"),
        ([{"utterance_id": True, "pred_text": "a"}], "no line matches an ingested utterance"),
        ([{"utterance_id": "zoe-1", "pred_text": "a"}], "no line matches an ingested utterance"),
        ([{"utterance_id": "ann-1", "text": "a"}], "no line matches an ingested utterance"),
    ],
)
def test_lines_that_are_none_are_named(spoken: Corpus, lines: list[object], said: str) -> None:
    """Nothing is ingested with them."""
    at = write_lines(spoken.audio.parent / "w.jsonl", lines)
    found = spoken.job(
        "ingest", "--manifest", manifest(spoken), "--format", "table", "--transcripts", f"w={at}"
    )
    assert found.code != 0
    assert re.search(said, found.err)


def test_a_text_of_another_encoding_is_named(spoken: Corpus) -> None:
    """By its line."""
    at = spoken.audio.parent / "w.txt"
    at.write_bytes("ann-1 a\nann-2 café\n".encode("latin-1"))
    given = ("--manifest", manifest(spoken), "--format", "table", "--transcripts", f"w={at}")
    assert "w.txt:2: not UTF-8" in spoken.job("ingest", *given).err


ANN = {"utterance_id": "ann-1", "pred_text": "a"}


@pytest.mark.parametrize(
    ("lines", "detail"),
    [
        ([ANN, ANN | {"pred_text": "b"}, ANN], "ann-1: two lines: keep one"),
        (
            [ANN, {"audio_filepath": "AUDIO", "pred_text": "b"}],
            "two lines of one utterance, ann-1 and .*ann-1.*: keep one",
        ),
        ([ANN | {"pred_text": 3}], "ann-1: .*need an object"),
        ([ANN | {"pred_text": "\u0434" * 90_000}], "ann-1: .* as JSON: need"),
        ([ANN | {"score": "b", "audio_filepath": "AUDIO"}], "need a finite number"),
        ([ANN | {"score": float("nan")}], "need a finite number"),
        ([ANN | {"audio_filepath": "AUDIO", "offset": 0.5}], "there are lines for its segments"),
        (
            [
                {"audio_filepath": "AUDIO", "offset": start, "pred_text": "a"}
                for start in (0, 0.2, 0.4)
            ],
            "there are lines for its segments: need one for all of it",
        ),
    ],
)
@pytest.mark.parametrize("of_directory", [False, True], ids=["manifest", "directory"])
def test_an_utterance_of_unusable_lines_is_a_ledger_row(
    spoken: Corpus, kaldi_dir: Path, lines: list[object], detail: str, *, of_directory: bool
) -> None:
    """The others are ingested with theirs, and the counts balance."""
    other = {"utterance_id": "ann-2", "pred_text": "c"}
    audio = kaldi_dir / "audio" / "ann-1.flac" if of_directory else spoken.audio / "ann-1.wav"
    rows = json.loads(json.dumps([*lines, other]).replace("AUDIO", str(audio)))
    at = write_lines(spoken.audio.parent / "w.jsonl", rows)
    given = ["--kaldi-dir", str(kaldi_dir)] if of_directory else ["--manifest", manifest(spoken)]
    given += [] if of_directory else ["--format", "table"]
    made = spoken.ingest(*given, "--transcripts", f"w={at}")
    [lost] = spoken.ledger()
    assert (lost["utterance_id"], lost["reason"]) == ("ann-1", "bad_field")
    assert re.search(detail, lost["detail"])
    assert made.tally_in.utterances == made.tally_out.utterances + 1
    subset = "labelled" if of_directory else "unlabelled"
    texts = {each.utterance_id: each.hypotheses for each in spoken.records(subset)}
    assert texts["ann-2"] == (Hypothesis("w", "c"),)
    assert "ann-1" not in texts


def test_recognizers_are_as_many_as_a_record_holds(spoken: Corpus) -> None:
    """Seventeen would each be ingested, and no step could read the records."""
    at = write_lines(spoken.audio.parent / "w.jsonl", [{"utterance_id": "ann-1", "pred_text": "a"}])
    given = [part for number in range(17) for part in ("--transcripts", f"w{number}={at}")]
    found = spoken.job("ingest", "--manifest", manifest(spoken), "--format", "table", *given)
    assert found.code != 0
    assert "17 recognizers: need at most 16" in found.err


@pytest.mark.parametrize("given", ["w", "=a.jsonl", "a b=c.jsonl", "w=", "w=missing.jsonl"])
def test_options_that_name_nothing(spoken: Corpus, given: str) -> None:
    """The option is named."""
    found = spoken.job("ingest", "--manifest", manifest(spoken), "--transcripts", given)
    assert found.code in (1, 2)
    assert given.partition("=")[2] in found.err


def test_a_directory_has_transcripts_beside_it(
    kaldi_dir: Path, tmp_path: Path, run_job: RunJob
) -> None:
    """By the utterance's id, or by the file that wav.scp names."""
    corpus = Corpus(tmp_path, run_job)
    lines: list[object] = [
        {"utterance_id": "ann-1", "pred_text": "Hello.", "score": -0.5},
        {"audio_filepath": str(kaldi_dir / "audio" / "ann-2.flac"), "pred_text": "World"},
    ]
    at = write_lines(kaldi_dir / "whisper.jsonl", lines)
    made = corpus.ingest("--kaldi-dir", str(kaldi_dir), "--transcripts", f"whisper={at}")
    found = {each.utterance_id: each for each in corpus.records("labelled")}
    assert found["ann-1"].hypotheses == (Hypothesis("whisper", "Hello.", -0.5),)
    assert found["ann-2"].hypotheses == (Hypothesis("whisper", "World"),)
    assert made.statistics["hypotheses"] == {"whisper": 2}
