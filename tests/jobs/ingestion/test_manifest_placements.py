"""Manifests' utterances are stored as they sound in drawn placements, as a directory's would be."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import soundfile

from pipeline.audio.decode import decode_audio
from pipeline.records import Tally
from pipeline.runs.manifest import read_manifest, read_output, sha256
from pipeline.steps.ingestion import ingest_manifests, manifest_rows, placed_audio
from pipeline.steps.ingestion.placed_audio import audio_key
from tests.jobs.ingestion.manifest_corpus import (
    KEPT,
    PLACED,
    Corpus,
    ingest_tables,
    manifest_of,
    records_of,
    row,
    stored,
    tree,
)
from tests.jobs.ingestion.test_kaldi_directory import metadata
from tests.small_corpus import flac, tone, wav

pytestmark = pytest.mark.usefixtures("without_spark", "small_acoustics")


def test_versions_are_those_of_a_kaldi_directory(corpus: Corpus, kaldi_dir: Path) -> None:
    """Ids, streams and the bytes of the FLACs are equal; clean audio stays where it is."""
    subsets = {"ann": "labelled", "bob": "unlabelled", "eve": "heldout"}
    for path in (kaldi_dir / "audio").iterdir():
        (corpus.audio / path.name).write_bytes(path.read_bytes())
    given = {
        subset: manifest_of(
            corpus, f"{subset}.jsonl", [row(f"{speaker}-{number}.flac") for number in (1, 2)]
        )
        for speaker, subset in subsets.items()
    }
    manifest = ingest_tables(corpus, given, *PLACED)
    ours = records_of(corpus)
    corpus.run_uri += "-kaldi"
    assert corpus.job("ingest", "--kaldi-dir", str(kaldi_dir), *PLACED).code == 0
    theirs = {
        record.utterance_id: record for _, record in metadata(Path(corpus.run_uri) / "corpus")
    }
    assert ours.keys() == theirs.keys()
    assert len(ours) == 4 * 3 + 2 * 2
    heard = set()
    for key, record in ours.items():
        assert [getattr(record, name) for name in KEPT] == [
            getattr(theirs[key], name) for name in KEPT
        ]
        if record.placement == "clean":
            assert record.audio_uri == str(corpus.audio / f"{key.removesuffix('-clean')}.flac")
            continue
        audio = stored(corpus, theirs[key])
        assert record.audio_uri == audio_key(key, sha256(audio))
        heard.add(record.audio_uri)
    ours_run = corpus.run_uri.removesuffix("-kaldi")
    outputs = {output.key: output for output in manifest.outputs}
    assert {key for key in outputs if key.startswith("audio/")} == heard
    for key in heard:
        assert read_output(corpus.store, f"{ours_run}/corpus", outputs[key])
    assert manifest.tally_in == manifest.tally_out == Tally(16, 8000)
    theirs_manifest = read_manifest(corpus.store, corpus.run_uri, "ingest")
    assert manifest.config["placements"] == theirs_manifest.config["placements"]
    assert manifest.versions == theirs_manifest.versions


def test_no_division_into_tasks_changes_a_byte(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rows, reads and tasks are cut, records and audio are the same."""
    for number in range(12):
        (corpus.audio / f"s{number:02d}-1.wav").write_bytes(wav(tone(number, 0.3)))
    rows = [row(f"s{number:02d}-1.wav", 0.3) for number in range(12)]
    given = {"labelled": manifest_of(corpus, "m.jsonl", rows)}
    found = []
    for pieces, shares, block in ((2**20, 16, 256), (2**20, 1, 256), (200, 3, 2), (700, 16, 1)):
        monkeypatch.setattr(manifest_rows, "PIECE_BYTES", pieces)
        monkeypatch.setattr(ingest_manifests, "SHARES_PER_PIECE", shares)
        for module in (ingest_manifests, placed_audio):
            monkeypatch.setattr(module, "BLOCK_ROWS", block)
        corpus.run_uri += "-"
        manifest = ingest_tables(corpus, given, "--placements", "2", "--dev-share", "0.3")
        audio = {key: data for key, data in tree(corpus).items() if "/metadata/" not in key}
        found.append((records_of(corpus, "labelled"), records_of(corpus, "dev"), audio))
        assert manifest.tally_out.utterances == 24
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0][1]) >= 2


def test_development_and_held_out_speakers_hear_rooms_of_their_own(corpus: Corpus) -> None:
    """Development speakers take the held-out placements; no acoustics are of two subsets."""
    samples = tone(1, 0.5)
    names = [f"s{number:02d}-1.wav" for number in range(12)]
    for name in names:
        (corpus.audio / name).write_bytes(wav(samples))
    given = {
        subset: manifest_of(corpus, f"{subset}.jsonl", [row(name) for name in some])
        for subset, some in (
            ("labelled", names[:8]),
            ("unlabelled", names[8:10]),
            ("heldout", names[10:]),
        )
    }
    manifest = ingest_tables(corpus, given, *PLACED, "--dev-share", "0.3")
    for subset, expected in (
        ("labelled", ["DP1", "DP3", "clean"]),
        ("unlabelled", ["DP1", "DP3", "clean"]),
        ("heldout", ["DP2", "DP5"]),
        ("dev", ["DP2", "DP5"]),
    ):
        placements = Counter(record.placement for record in corpus.records(subset))
        assert sorted(placements, key=str) == expected
        assert len(set(placements.values())) == 1
    # Labelled and unlabelled speech share those of training.
    assert sum(output.key.startswith("acoustics/") for output in manifest.outputs) == 3


def test_parts_and_other_rates_are_heard(corpus: Corpus) -> None:
    """Segments, members of tars and converted audio become FLACs that are whole objects."""
    recording = tone(1, 3)
    (corpus.audio / "ann-r.flac").write_bytes(flac(recording))
    (corpus.audio / "ann-s.flac").write_bytes(flac(recording[8000:16_000]))
    member = wav(tone(2, 0.5))
    with tarfile.open(corpus.audio / "ann.tar", "w") as archive:
        info = tarfile.TarInfo("a.wav")
        info.size = len(member)
        archive.addfile(info, io.BytesIO(member))
        offset = 512
    soundfile.write(corpus.audio / "ann-8.wav", tone(3, 1.0)[::2], 8000)
    rows = [
        row("ann-r.flac", 0.5, start_s=0.5, utterance_id="ann-part"),
        row("ann.tar", 0.5, member_offset=offset, member_bytes=len(member)),
        row("ann-8.wav", 1.0),
    ]
    conversion = ("--set", "features.conversion.sample_rates_hz=[8000]")
    given = {"unlabelled": manifest_of(corpus, "m.jsonl", rows)}
    manifest = ingest_tables(corpus, given, "--placements", "DP1", *conversion)
    found = records_of(corpus)
    assert {key: record.duration_s for key, record in found.items()} == {
        "ann-part-DP1": 0.5,
        "ann-DP1": 0.5,
        "ann-8-DP1": 1.0,
    }
    assert all(record.part is None for record in found.values())
    for record in found.values():
        samples = decode_audio(stored(corpus, record))
        assert len(samples) == round(record.duration_s * 16_000)
    assert manifest.config["conversion"]["sample_rates_hz"] == [8000]
    # A segment sounds as the same speech does in a file of its own.
    corpus.run_uri += "-file"
    alone = {
        "unlabelled": manifest_of(corpus, "s.jsonl", [row("ann-s.flac", utterance_id="ann-part")])
    }
    ingest_tables(corpus, alone, "--placements", "DP1")
    assert records_of(corpus)["ann-part-DP1"].audio_uri == found["ann-part-DP1"].audio_uri


def test_again_and_with_other_choices(corpus: Corpus, three: dict[str, str]) -> None:
    """A finished step is found; a second corpus is the same; other choices are other work."""
    ingest_tables(corpus, three, *PLACED)
    before = tree(corpus)
    named = [part for subset, uri in three.items() for part in ("--manifest", f"{subset}={uri}")]
    options = ("--set", "loss_budget=0.9", *named, "--format", "table")
    assert "nothing to do" in corpus.job("ingest", *options, *PLACED).out
    for other in ((), ("--placements", "DP1"), (*PLACED, "--placement-seed", "1")):
        said = corpus.job("ingest", *options, *other)
        assert said.code == 1
        assert "was made from another recipe or other inputs" in said.err
    corpus.run_uri += "2"
    ingest_tables(corpus, three, *PLACED)
    assert tree(corpus) == before


def test_a_corpus_in_placements_is_selected_extracted_and_verified(
    corpus: Corpus, three: dict[str, str]
) -> None:
    """Every version has features; `verify` sees a changed FLAC and one that nobody stored."""
    ingest_tables(corpus, three, *PLACED)
    for job in ("select_utterances", "extract_features"):
        said = corpus.job(job)
        assert said.code == 0, said.err
    for subset, number in (("labelled", 6), ("unlabelled", 6), ("heldout", 4)):
        manifest = read_manifest(corpus.store, corpus.run_uri, f"features/{subset}")
        assert (manifest.tally_out.utterances, manifest.quarantined.utterances) == (number, 0)
    assert json.loads(corpus.job("verify", "--json").out)["findings"] == []
    folder = Path(corpus.run_uri) / "corpus" / "audio"
    first = min(folder.glob("*/*.flac"))
    kept = first.read_bytes()
    first.write_bytes(kept[:-1] + b"x")
    (folder / "stray.flac").write_bytes(b"x")
    found = json.loads(corpus.job("verify", "--json").out)["findings"]
    assert {Path(each["object"]).name for each in found} == {first.name, "stray.flac"}


def test_an_increment_adds_placements(corpus: Corpus, three: dict[str, str]) -> None:
    """A night's speech is stored beside that of the base, and both are verified."""
    folder = corpus.audio.parent
    place = ("--set", f'corpus.uri="{folder}/corpus"')
    corpus.run_uri = str(folder / "runs" / "1")
    first = ("--manifest", three["unlabelled"], "--format", "table", "--placements", "DP1")
    assert corpus.job("ingest", *place, *first).code == 0
    base = corpus.run_uri
    corpus.run_uri = str(folder / "runs" / "2")
    night = manifest_of(corpus, "night.jsonl", [row("ann-2.flac")])
    second = ("--manifest", night, "--format", "table", "--placements", "DP1", "--extends", base)
    said = corpus.job("ingest", *place, *second)
    assert said.code == 0, said.err
    found = corpus.records_at(f"{folder}/corpus", "unlabelled")
    assert [each.utterance_id for each in found] == ["ann-2-DP1", "bob-1-DP1", "bob-2-DP1"]
    for run in (base, corpus.run_uri):
        corpus.run_uri = run
        assert json.loads(corpus.job("verify", *place, "--json").out)["findings"] == []
