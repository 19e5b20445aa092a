"""A Kaldi data directory becomes a corpus, or a message that says what to repair."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from infra.store.object_store import ObjectInfo, ObjectStore, join_uri
from pipeline.records import Utterance, parse_utterance
from pipeline.steps.ingestion.kaldi_directory import (
    DirectoryIngestion,
    plan_copy,
    read_kaldi_directory,
)
from tests.job_programs import RunJob
from tests.jobs.ingestion.conftest import append, copied, write
from tests.whole_path.processes import TINY


def metadata(corpus: Path) -> Iterator[tuple[str, Utterance]]:
    for path in sorted(corpus.glob("metadata/*/date=*/speaker_bucket=*/part-00000.jsonl")):
        for line in path.read_text().splitlines():
            yield path.relative_to(corpus).parts[1], parse_utterance(line)


def tree(corpus: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in corpus.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    "name", ["wav.scp", "text", "utt2spk", "labelled.speakers", "heldout.speakers"]
)
def test_missing_file_is_named(kaldi_dir: Path, name: str) -> None:
    """The message names the missing file and lists what a data directory needs."""
    (kaldi_dir / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}: missing; a data directory needs text"):
        read_kaldi_directory(kaldi_dir)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("wav.scp", "ann-3 raw.1.ark:234", "an entry of a Kaldi archive is not read: name files"),
        ("wav.scp", "ann-3 sox a.mp3 -t wav - |", "a command .* is not run: run the commands once"),
        ("wav.scp", "../ann audio/ann-1.flac", "becomes an object key: rename"),
        ("wav.scp", "ann-3 audio/ann-1.flac", "utt2spk: no speaker for ann-3 of wav.scp: add them"),
        ("wav.scp", "ann-1 audio/ann-2.flac", "wav.scp:7: ann-1 a second time"),
        ("utt2spk", "ann-9 ann", "utt2spk: ann-9 not in wav.scp"),
        ("text", "ann-9 HELLO", "text: ann-9 not in wav.scp"),
        ("utt2placement", "ann-1", "utt2placement:1: ann-1 alone"),
        ("utt2time", "ann-1 2020-01-01T00:00:00", "need ISO 8601 with an offset"),
        ("utt2dur", "ann-1 -2", "utt2dur: ann-1 -2: need seconds above 0"),
        ("heldout.speakers", "ann", "ann also in labelled.speakers: leave it in one"),
        ("unlabelled.speakers", "zoe", "zoe not in utt2spk"),
        ("utt2lang", "ann-9 nl", "utt2lang: ann-9 not in wav.scp"),
        ("utt2dur", "ann-1 nan", "utt2dur: ann-1 nan: need seconds above 0"),
        ("utt2time", "ann-1 10000-01-01T00:00:00Z", "need ISO 8601 with an offset"),
        ("segments", "ann-1 ann 0.0 0.5", "segments: recordings are not cut .* extract-segments"),
        ("dev.speakers", "", "dev.speakers: lists no speaker: need at least one"),
        ("utt2mood", "ann-1 glad", "data: utt2mood: a table that is not known: move it out"),
        ("reco2file_and_channel", "ann-1 ann B", "ann-1 ann B: write a file for each side"),
    ],
)
def test_broken_line_is_named(kaldi_dir: Path, name: str, line: str, message: str) -> None:
    """The message names file, key and remedy."""
    append(kaldi_dir, name, line)
    with pytest.raises(ValueError, match=message):
        read_kaldi_directory(kaldi_dir)


def test_locales_are_a_speakers_an_utterances_or_the_options(kaldi_dir: Path) -> None:
    """In this order; harmless tables change nothing."""
    write(kaldi_dir, "spk2locale", ["ann nl-NL"])
    write(kaldi_dir, "utt2lang", ["ann-1 de", "bob-1 de"])
    write(kaldi_dir, "spk2gender", ["ann f"])
    write(kaldi_dir, "reco2file_and_channel", ["ann-1 ann A"])
    found = read_kaldi_directory(kaldi_dir, locale="en-GB").utterances
    locales = {each.utterance_id: each.locale for each in found}
    assert locales == {
        "ann-1": "nl-NL",
        "ann-2": "nl-NL",
        "bob-1": "de",
        **dict.fromkeys(("bob-2", "eve-1", "eve-2"), "en-GB"),
    }


def test_labelled_utterance_needs_a_transcript(kaldi_dir: Path) -> None:
    """Without text an unlabelled utterance is as good as with it; a labelled one is refused."""
    lines = (kaldi_dir / "text").read_text().splitlines()
    write(kaldi_dir, "text", [line for line in lines if not line.startswith("bob")])
    read_kaldi_directory(kaldi_dir)
    write(kaldi_dir, "text", lines[1:])
    with pytest.raises(ValueError, match="no transcript of ann-1: add it, or take speaker ann"):
        read_kaldi_directory(kaldi_dir)


def test_corpus_holds_audio_and_metadata(kaldi_dir: Path, tmp_path: Path) -> None:
    """Audio is copied as it is, records point to it, and unlabelled text is nowhere."""
    write(kaldi_dir, "utt2placement", ["eve-1 DP3"])
    write(kaldi_dir, "utt2time", ["eve-1 2020-02-01T00:30:00+01:00"])
    write(kaldi_dir, "spk2locale", ["eve en-GB"])
    corpus = tmp_path / "corpus"
    store = ObjectStore((str(corpus),))
    summary = copied(kaldi_dir, corpus)
    records = {record.utterance_id: (subset, record) for subset, record in metadata(corpus)}
    assert summary.plan.statistics["utterances"] == {"labelled": 2, "unlabelled": 2, "heldout": 2}
    assert len(records) == 6
    for key, (subset, record) in records.items():
        audio = store.get(join_uri(str(corpus), record.audio_uri))
        assert audio == (kaldi_dir / "audio" / f"{key}.flac").read_bytes()
        assert record.duration_s == 0.5
        assert record.text == (None if subset == "unlabelled" else "HELLO WORLD")
    subset, record = records["eve-1"]
    assert (subset, record.placement, record.locale) == ("heldout", "DP3", "en-GB")
    assert list(corpus.glob("metadata/heldout/date=2020-01-31/*/part-00000.jsonl"))
    assert records["bob-1"][1].locale == "und"
    assert not any("HELLO" in path.read_text() for path in corpus.glob("metadata/unlabelled/*/*/*"))


def test_second_ingest_writes_nothing(kaldi_dir: Path, tmp_path: Path) -> None:
    """A second run leaves every byte and modification time."""
    corpus = tmp_path / "corpus"
    first = copied(kaldi_dir, corpus)
    before = tree(corpus)
    assert copied(kaldi_dir, corpus) == first
    assert tree(corpus) == before


def test_interrupted_ingest_is_completed(kaldi_dir: Path, tmp_path: Path) -> None:
    """After a loss of some objects, a second run restores the same bytes."""
    corpus = tmp_path / "corpus"
    copied(kaldi_dir, corpus)
    before = {path: data for path, (data, _) in tree(corpus).items()}
    shutil.rmtree(corpus / "metadata" / "labelled")
    next(corpus.glob("audio/*/*.flac")).unlink()
    copied(kaldi_dir, corpus)
    assert {path: data for path, (data, _) in tree(corpus).items()} == before


def test_another_corpus_in_the_way_is_refused(kaldi_dir: Path, tmp_path: Path) -> None:
    """Changed audio, changed metadata and vanished speakers are each reported, not mixed in."""
    corpus = tmp_path / "corpus"
    copied(kaldi_dir, corpus)
    write(kaldi_dir, "spk2locale", ["ann en-GB"])
    with pytest.raises(ValueError, match=r"labelled/.*another corpus .*use another corpus.uri"):
        copied(kaldi_dir, corpus)
    write(kaldi_dir, "spk2locale", [])
    write(kaldi_dir, "unlabelled.speakers", ["eve"])
    write(kaldi_dir, "heldout.speakers", ["bob"])
    with pytest.raises(ValueError, match=r"metadata/\w+/.*from another corpus"):
        copied(kaldi_dir, corpus)
    soundfile.write(kaldi_dir / "audio" / "ann-1.flac", np.zeros(16_000), 16_000)
    with pytest.raises(ValueError, match=r"ann-1.flac is from another corpus"):
        copied(kaldi_dir, corpus)


def test_an_ingest_of_another_corpus_at_the_same_time_is_refused(
    kaldi_dir: Path, tmp_path: Path
) -> None:
    """Audio that came after the listing, of equal size, is compared and not replaced."""
    corpus = tmp_path / "corpus"
    copied(kaldi_dir, corpus)
    (audio,) = corpus.glob("audio/*/ann-1.flac")
    others = audio.read_bytes()[::-1]
    audio.write_bytes(others)

    class Listed(ObjectStore):
        def list(self, _: str) -> list[ObjectInfo]:
            return []

    with pytest.raises(ValueError, match=r"ann-1.flac is from another corpus"):
        plan_copy(DirectoryIngestion(kaldi_dir)).write(Listed((str(corpus),)), str(corpus))
    assert audio.read_bytes() == others


def test_unreadable_audio_is_kept_for_the_quarantine(kaldi_dir: Path, tmp_path: Path) -> None:
    """Its bytes are copied; its duration is utt2dur's, or else 1 ms."""
    (kaldi_dir / "audio" / "ann-1.flac").write_bytes(b"not audio")
    path = kaldi_dir / "audio" / "bob-1.flac"
    data = path.read_bytes()
    path.write_bytes(data[:22] + bytes(4) + data[26:])  # written to a pipe: of unknown length
    write(kaldi_dir, "utt2dur", ["ann-1 2.5"])
    corpus = tmp_path / "corpus"
    store = ObjectStore((str(corpus),))
    summary = copied(kaldi_dir, corpus)
    records = {record.utterance_id: record for _, record in metadata(corpus)}
    assert summary.plan.statistics["unreadable"] == 2
    assert (records["ann-1"].duration_s, records["bob-1"].duration_s) == (2.5, 0.001)
    assert store.get(join_uri(str(corpus), records["ann-1"].audio_uri)) == b"not audio"


def test_utterances_without_time_follow_one_another(kaldi_dir: Path, tmp_path: Path) -> None:
    """Each speaker's first utterance begins at the epoch, the next where it ended."""
    corpus = tmp_path / "corpus"
    copied(kaldi_dir, corpus)
    records = {record.utterance_id: record.created_at for _, record in metadata(corpus)}
    assert records["bob-1"] == "1970-01-01T00:00:00.000+00:00"
    assert records["bob-2"] == "1970-01-01T00:00:00.500+00:00"


def test_speakers_in_no_list_are_counted(kaldi_dir: Path, tmp_path: Path) -> None:
    """They stay out of the corpus, and the summary says how many utterances that cost."""
    append(kaldi_dir, "wav.scp", "dan-1 audio/ann-1.flac")
    append(kaldi_dir, "utt2spk", "dan-1 dan")
    corpus = tmp_path / "corpus"
    summary = copied(kaldi_dir, corpus)
    assert summary.plan.statistics["unlisted"] == 1
    assert len(list(corpus.glob("audio/*/*.flac"))) == 6


def test_labelled_speech_alone_needs_no_unlabelled_speakers(
    run_job: RunJob, kaldi_dir: Path, tmp_path: Path
) -> None:
    """Unless its models normalize by those, which is said before anything is stored."""
    (kaldi_dir / "unlabelled.speakers").unlink()
    run = tmp_path / "run"
    given = ("--recipe", str(TINY), "--run", str(run), "--kaldi-dir", str(kaldi_dir))
    said = run_job("ingest", *given)
    assert said.code == 1
    assert "unlabelled.speakers: missing, and models.normalization = 'all': add it, or" in said.err
    assert not (run / "corpus").exists()
    said = run_job("ingest", *given, "--set", "models.normalization='labelled'")
    assert said.code == 0, said.err
    subsets = {each.name for each in (run / "corpus" / "metadata").iterdir()}
    assert subsets == {"labelled", "heldout"}
