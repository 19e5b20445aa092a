"""Ingest stores each utterance in drawn placements: ids of their own, the same bytes each time."""

import json
from collections import Counter, defaultdict
from functools import partial
from importlib import metadata as metadata_of_packages
from importlib.metadata import version
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import soundfile

from infra.store.object_store import ObjectStore, join_uri
from jobs.ingest import SIMULATORS, draw
from jobs.synthesis.acoustics import NUM_TALKERS, draw_talkers
from jobs.synthesis.corpus import acoustics_tasks
from pipeline.audio.decode import decode_audio, decode_utterance
from pipeline.audio.placements import PLACEMENTS, noise_for
from pipeline.records import Tally, Utterance, stream_order
from pipeline.runs.manifest import read_manifest, sha256
from pipeline.settings import ExtractionConfig
from pipeline.shards import FeatureRow
from pipeline.steps.features import audio_objects, extract_rows
from pipeline.steps.ingestion.placed_audio import PlacementChoice, Simulation, SubsetChoices
from tests.job_programs import RunJob
from tests.jobs.ingestion.conftest import Copied, append, copied, write
from tests.jobs.ingestion.test_kaldi_directory import metadata, tree

TINY = Path(__file__).parents[2] / "whole_path" / "tiny.toml"
NAMES = [placement.name for placement in PLACEMENTS]
PAIR = PlacementChoice(("clean", "DP3"), 2)
DRAWN = PlacementChoice(tuple(NAMES), 2)

pytestmark = pytest.mark.usefixtures("small_acoustics")


def simulation(
    training: PlacementChoice, heldout: PlacementChoice = PAIR, seed: int = 0
) -> Simulation:
    return Simulation(SubsetChoices(training, heldout, seed), partial(draw, seed), SIMULATORS)


def ingest_to(corpus: Path, kaldi_dir: Path, *choices: PlacementChoice, seed: int = 0) -> Copied:
    return copied(kaldi_dir, corpus, simulation(*choices, seed=seed))


def test_versions_have_ids_of_their_own_and_one_speaker(kaldi_dir: Path, tmp_path: Path) -> None:
    """Text, speaker and subset are the utterance's; clean audio is the file, the other is not."""
    corpus = tmp_path / "corpus"
    found = ingest_to(corpus, kaldi_dir, PAIR, PlacementChoice(("DP1", "DP5"), 2))
    records = {record.utterance_id: (subset, record) for subset, record in metadata(corpus)}
    assert found.plan.statistics["utterances"] == {"labelled": 4, "unlabelled": 4, "heldout": 4}
    assert set(records) == {
        f"{name}-{number}-{placement}"
        for name in ("ann", "bob", "eve")
        for number in (1, 2)
        for placement in (("DP1", "DP5") if name == "eve" else ("clean", "DP3"))
    }
    subsets = {"ann": "labelled", "bob": "unlabelled", "eve": "heldout"}
    for key, (subset, record) in records.items():
        source, placement = key.rsplit("-", 1)
        assert (record.speaker_id, record.placement) == (source[:3], placement)
        assert subset == subsets[record.speaker_id]
        assert record.text == (None if subset == "unlabelled" else "HELLO WORLD")
        assert record.duration_s == 0.5
        given = (kaldi_dir / "audio" / f"{source}.flac").read_bytes()
        audio = Path(join_uri(str(corpus), record.audio_uri)).read_bytes()
        assert (audio == given) == (placement == "clean")
        assert len(decode_utterance(audio, key, record.duration_s, "kaldi").samples) == 8000


def features_of(corpus: Path, speaker_id: str) -> dict[str, bytes]:
    """Extract a speaker's utterances as one task reads them; return the bytes by utterance."""
    records = [record for _, record in metadata(corpus) if record.speaker_id == speaker_id]
    records.sort(key=stream_order)
    audio = audio_objects(ObjectStore((str(corpus),)), str(corpus), records, 4)
    rows = list(extract_rows(records, audio.read(), ExtractionConfig(4, 3)))
    return {row.utterance_id: row.features.tobytes() for row in rows if isinstance(row, FeatureRow)}


def test_features_depend_on_no_other_placement(kaldi_dir: Path, tmp_path: Path) -> None:
    """Each placement is a stream of its own, so its causal mean is that of ingesting it alone."""
    choices = [("DP3",), ("clean", "DP1", "DP3"), ("clean",)]
    found = []
    for number, names in enumerate(choices):
        corpus = tmp_path / str(number)
        ingest_to(corpus, kaldi_dir, PlacementChoice(names, len(names)))
        found.append(features_of(corpus, "ann"))
    alone, together, clean = found
    assert alone.keys() == {"ann-1-DP3", "ann-2-DP3"}
    assert len(together) == 6
    assert alone.items() | clean.items() <= together.items()
    plain = tmp_path / "plain"
    copied(kaldi_dir, plain)
    # Clean speech has the mean of a corpus without placements.
    assert features_of(plain, "ann")["ann-2"] == together["ann-2-clean"]
    assert alone["ann-2-DP3"] != clean["ann-2-clean"]


def test_a_version_sounds_of_its_placement(kaldi_dir: Path, tmp_path: Path) -> None:
    """Farther placements resemble the speech less; training and held-out rooms differ."""
    corpus = tmp_path / "corpus"
    every = PlacementChoice(tuple(NAMES), 5)
    ingest_to(corpus, kaldi_dir, every, every)
    likeness = defaultdict(list)
    for _, record in metadata(corpus):
        heard = decode_audio(Path(join_uri(str(corpus), record.audio_uri)).read_bytes())
        source = record.utterance_id.rsplit("-", 1)[0]
        speech = decode_audio((kaldi_dir / "audio" / f"{source}.flac").read_bytes())
        likeness[record.placement].append(np.corrcoef(heard, speech)[0, 1])
    means = [np.mean(likeness[name]) for name in NAMES]
    assert means[0] > means[2] > means[4] > 0
    drawn = draw(0, ("labelled", "unlabelled", "heldout", "dev"))
    assert drawn["labelled"] is drawn["unlabelled"]
    assert len({id(acoustics) for acoustics in drawn.values()}) == 3


def test_development_speakers_are_in_the_held_out_placements(
    kaldi_dir: Path, tmp_path: Path
) -> None:
    """Models are tuned for the placements that score them, not for those of training."""
    append(kaldi_dir, "utt2spk", "dan-1 dan")
    append(kaldi_dir, "wav.scp", "dan-1 audio/ann-1.flac")
    append(kaldi_dir, "text", "dan-1 HELLO")
    write(kaldi_dir, "dev.speakers", ["dan"])
    corpus = tmp_path / "corpus"
    found = ingest_to(corpus, kaldi_dir, PAIR, PlacementChoice(("DP1", "DP2", "DP5"), 3))
    assert found.plan.statistics["utterances"] == {
        "labelled": 4,
        "unlabelled": 4,
        "heldout": 6,
        "dev": 3,
    }
    heard = {(subset, record.placement) for subset, record in metadata(corpus)}
    for subset, placements in (
        ("labelled", ("clean", "DP3")),
        ("dev", ("DP1", "DP2", "DP5")),
        ("heldout", ("DP1", "DP2", "DP5")),
    ):
        assert {name for where, name in heard if where == subset} == {*placements}


def test_development_speakers_hear_babble_of_their_own(tmp_path: Path) -> None:
    """Rooms and noises are drawn by a key of their own, and no talker babbles in two subsets."""
    for seed in range(5):
        tasks = acoustics_tasks(seed, tmp_path).values()
        assert len({task.key for task in tasks}) == len({task.path for task in tasks}) == 3
        talkers = [
            draw_talkers(task.babble_voices, np.random.default_rng(task.key)) for task in tasks
        ]
        assert len({voice for some in talkers for voice in some}) == 3 * NUM_TALKERS


def test_placements_are_drawn_evenly_and_twice_never() -> None:
    """Of five placements each pair has a tenth of the utterances; a seed draws other ones."""
    drawn = [tuple(DRAWN.of(f"utterance-{number}", 0)) for number in range(5000)]
    counts = Counter(drawn)
    assert set(counts) == set(combinations(NAMES, 2))
    assert all(abs(count / 500 - 1) < 0.2 for count in counts.values())
    other = [tuple(DRAWN.of(f"utterance-{number}", 1)) for number in range(5000)]
    assert 0.05 < np.mean([a == b for a, b in zip(drawn, other, strict=True)]) < 0.15
    assert PlacementChoice(("DP5", "clean"), 2).of("x", 0) == ["DP5", "clean"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", r"placements = 0: need 1\.\.5 to draw, or names"),
        ("6", r"placements = 6: need 1\.\.5 to draw"),
        ("DP1,DP9", "placements = 'DP9': need a number, or some of clean, DP1, DP2, DP3, DP4, DP5"),
        ("DP1,DP1", "placements = DP1,DP1: need each name once"),
        ("", "placements = '': need a number"),
        ("-1", "placements = '-1': need a number"),
        ("3:clean,DP3", r"placements = 3:clean,DP3: need 1\.\.2 to draw, or names"),
        ("x:clean,DP3", r"placements = x:clean,DP3: need 1\.\.2 to draw"),
        ("1:DP9", "placements = 'DP9': need a number"),
        ("1:", "placements = '': need a number"),
        (":clean", r"placements = :clean: need 1\.\.1 to draw"),
        ("1:1:clean", "placements = '1:clean': need a number"),
    ],
)
def test_other_placements_are_refused(text: str, message: str) -> None:
    """The message names the value, and what there is."""
    with pytest.raises(ValueError, match=message):
        PlacementChoice.parse(text, NAMES)
    assert PlacementChoice.parse("2", NAMES) == DRAWN
    assert PlacementChoice.parse("clean,DP3", NAMES) == PAIR
    assert PlacementChoice.parse("1:clean,DP3", NAMES) == PlacementChoice(("clean", "DP3"), 1)


def test_an_interrupted_ingest_is_completed_to_the_same_bytes(
    kaldi_dir: Path, tmp_path: Path
) -> None:
    """An interrupted ingest simulates missing audio again, and compares the audio that is there."""
    corpus, again = tmp_path / "corpus", tmp_path / "again"
    first = ingest_to(corpus, kaldi_dir, DRAWN, DRAWN)
    whole = tree(corpus)
    for output in first.outputs:
        data = (corpus / output.key).read_bytes()
        assert (output.num_bytes, output.sha256) == (len(data), sha256(data))
    removed = [*sorted(corpus.glob("audio/*/*.flac"))[::2], *corpus.glob("metadata/labelled/*/*/*")]
    for path in removed:
        path.unlink()
    second = ingest_to(corpus, kaldi_dir, DRAWN, DRAWN)
    assert second.outputs == first.outputs
    kept = {str(path): whole[path] for path in whole if Path(path) not in removed}
    assert kept.items() <= tree(corpus).items()
    assert ingest_to(again, kaldi_dir, DRAWN, DRAWN).outputs == first.outputs


def test_another_seed_is_another_corpus(kaldi_dir: Path, tmp_path: Path) -> None:
    """Rooms, noises and draws follow from the seed, so one does not complete the other."""
    corpus = tmp_path / "corpus"
    ingest_to(corpus, kaldi_dir, PAIR)
    with pytest.raises(ValueError, match=r"-DP3.flac is from another corpus"):
        ingest_to(corpus, kaldi_dir, PAIR, seed=1)


def damaged_checksum(path: Path) -> None:
    """Change the MD5 that a FLAC states of its samples, and nothing else."""
    data = bytearray(path.read_bytes())
    data[26] ^= 1
    path.write_bytes(data)


REFUSED = {
    "not_audio": lambda path: path.write_bytes(b"not audio"),
    "checksum_mismatch": damaged_checksum,
    "wrong_sample_rate": lambda path: soundfile.write(path, np.ones(4000) * 0.1, 8000),
    "silent": lambda path: soundfile.write(path, np.zeros(8000), 16_000),
    "missing_object": Path.unlink,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_audio_that_cannot_be_simulated_is_a_row_a_version(
    kaldi_dir: Path, tmp_path: Path, reason: str
) -> None:
    """Each version that is not stored is in the ledger, so that the books balance."""
    REFUSED[reason](kaldi_dir / "audio" / "bob-1.flac")
    corpus, choice = tmp_path / "corpus", PlacementChoice(("DP2", "DP4"), 2)
    found = ingest_to(corpus, kaldi_dir, choice, choice)
    assert [(row.utterance_id, row.reason) for row in found.plan.quarantined] == [
        ("bob-1-DP2", reason),
        ("bob-1-DP4", reason),
    ]
    kept = sum((output.tally for output in found.outputs), Tally())
    assert kept == Tally(10, 5000)
    assert len(list(corpus.glob("audio/*/*"))) == 10


def test_recorded_placements_are_not_simulated_over(kaldi_dir: Path, tmp_path: Path) -> None:
    """A directory that states its placements is refused, with the remedy, before it is written."""
    write(kaldi_dir, "utt2placement", ["eve-1 DP3"])
    with pytest.raises(ValueError, match=r"utt2placement: eve-1 is .* remove utt2placement, or"):
        ingest_to(tmp_path / "corpus", kaldi_dir, PAIR)
    assert not (tmp_path / "corpus").exists()


def test_the_lengths_of_mp3s_are_those_of_their_versions(kaldi_dir: Path, tmp_path: Path) -> None:
    """A FLAC has no padding of a codec, so its record states the decoded length."""
    samples = np.random.default_rng(0).standard_normal(16_100) * 0.1
    soundfile.write(kaldi_dir / "audio" / "ann-3.mp3", samples, 16_000)
    for name, line in (
        ("wav.scp", "ann-3 audio/ann-3.mp3"),
        ("utt2spk", "ann-3 ann"),
        ("text", "ann-3 HELLO"),
    ):
        append(kaldi_dir, name, line)
    corpus = tmp_path / "corpus"
    ingest_to(corpus, kaldi_dir, PAIR)
    records = {record.utterance_id: record for _, record in metadata(corpus)}
    made: Utterance = records["ann-3-DP3"]
    audio = (corpus / made.audio_uri).read_bytes()
    assert made.audio_uri.endswith(".flac")
    assert records["ann-3-clean"].audio_uri.endswith(".mp3")
    assert made.duration_s == round(len(decode_audio(audio)) / 16_000, 6)


def test_speech_longer_than_the_noise_hears_it_again(acoustics) -> None:
    """Noise of a second under speech of 2.5 s, at the same ratio."""
    speech = np.random.default_rng(1).normal(size=40_000).astype(np.float32)
    noise = noise_for(speech, PLACEMENTS[0], acoustics[0], np.random.default_rng(2))
    assert len(noise) == 40_000
    np.testing.assert_array_equal(noise[:16_000], noise[16_000:32_000])


def without_simulator(name: str) -> str:
    """Return versions of an upgraded installation that lacks the demo extra."""
    if name == "pyroomacoustics":
        raise metadata_of_packages.PackageNotFoundError(name)
    return "99.1" if name in SIMULATORS else version(name)


def test_only_work_that_is_left_needs_the_simulators(
    run_job: RunJob, kaldi_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished ingest is found whatever is installed; the manifest names what simulated it."""
    run_uri = str(tmp_path / "run")
    arguments = ("--recipe", str(TINY), "--run", run_uri, "--kaldi-dir", str(kaldi_dir), "--json")
    choices = ("--placements", "DP1,DP2")
    assert run_job("ingest", *arguments, *choices).code == 0
    manifest = read_manifest(ObjectStore((run_uri,)), run_uri, "ingest")
    assert manifest.versions.keys() == {"megahour", *SIMULATORS}
    monkeypatch.setattr(metadata_of_packages, "version", without_simulator)
    again = run_job("ingest", *arguments, *choices)
    assert json.loads(again.out)["status"] == "nothing to do"
    (tmp_path / "run" / "ingest" / "manifest.json").unlink()
    said = run_job("ingest", *arguments, *choices)
    assert said.code == 2
    assert "--placements: pyroomacoustics: simulated placements need it: pip install" in said.err
    copied = ("--run", str(tmp_path / "copied"), *arguments[4:])
    assert run_job("ingest", *arguments[:2], *copied).code == 0


def test_the_job_ingests_placements(run_job: RunJob, kaldi_dir: Path, tmp_path: Path) -> None:
    """Its manifest states them; verify balances; other placements are another ingest."""
    run_uri = str(tmp_path / "run")
    arguments = ("--recipe", str(TINY), "--run", run_uri, "--kaldi-dir", str(kaldi_dir), "--json")
    choices = ("--placements", "2", "--heldout-placements", "clean,DP1,DP5")
    assert run_job("ingest", *arguments, *choices).code == 0
    manifest = read_manifest(ObjectStore((run_uri,)), run_uri, "ingest")
    assert manifest.statistics["utterances"] == {"labelled": 4, "unlabelled": 4, "heldout": 6}
    stated = manifest.config["placements"]
    assert stated["heldout"] == {"placements": ["clean", "DP1", "DP5"], "count": 3}
    assert (stated["training"]["count"], stated["seed"]) == (2, 0)
    assert json.loads(run_job("ingest", *arguments, *choices).out)["status"] == "nothing to do"
    assert run_job("verify", *arguments[:4]).code == 0
    assert run_job("ingest", *arguments).code == 1
    for wrong, message in (
        (("--placements", "DP7"), "--placements: placements = 'DP7': need a number"),
        (
            ("--placements", "2", "--heldout-placements", "DP7"),
            "--heldout-placements: placements = 'DP7': need a number",
        ),
        (("--heldout-placements", "2"), "--heldout-placements without --placements: give both"),
        (("--placement-seed", "0"), "--placement-seed without --placements: give both"),
        (("--placements", "2", "--placement-seed", "-1"), "--placement-seed: seed = -1: need 0.."),
    ):
        said = run_job("ingest", *arguments, *wrong)
        assert said.code == 2
        assert message in said.err
