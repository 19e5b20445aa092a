"""The synthetic corpus: the same bytes for a seed, and difficulty where it is claimed."""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jobs.synthesis.acoustics import draw_impulse_response, draw_rooms
from jobs.synthesis.corpus import SynthesisConfig, SynthesisSummary, draw_speakers, synthesize
from jobs.synthesis.sentences import draw_sentence, vocabulary
from jobs.synthesis.speech import PHONES, phone_name
from jobs.synthesize import main
from pipeline.audio.placements import PLACEMENTS, Acoustics, noise_for, record, reverberate

TINY = SynthesisConfig(
    labelled_hours=0.004,
    unlabelled_hours=0.008,
    num_labelled_speakers=2,
    num_unlabelled_speakers=3,
    num_heldout_speakers=2,
    heldout_utterances_per_placement=3,
    seed=7,
)


@pytest.fixture(scope="module", autouse=True)
def short_noise() -> Iterator[None]:
    """Hear three seconds of noise again and again: to make two minutes takes 4 s of CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobs.synthesis.corpus._NOISE_S", 3.0)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SynthesisSummary]:
    directory = tmp_path_factory.mktemp("synthesis") / "corpus"
    return directory, synthesize(TINY, directory, num_processes=2)


@pytest.fixture(scope="module")
def directory(corpus: tuple[Path, SynthesisSummary]) -> Path:
    return corpus[0]


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def table(directory: Path, name: str) -> dict[str, str]:
    lines = (directory / name).read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


@pytest.mark.chaos
def test_bytes_do_not_depend_on_the_number_of_processes(directory: Path, tmp_path: Path) -> None:
    """One process and two write the same files, byte for byte."""
    synthesize(TINY, tmp_path / "again", num_processes=1)
    assert digests(tmp_path / "again") == digests(directory)


def test_finished_corpus_is_left_alone(corpus: tuple[Path, SynthesisSummary]) -> None:
    """A second run answers with the same summary and touches no file."""
    directory, summary = corpus
    times = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    assert synthesize(TINY, directory) == summary
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == times


def test_another_corpus_in_the_way_is_refused(directory: Path, tmp_path: Path) -> None:
    """Neither another seed's corpus nor foreign files are overwritten."""
    with pytest.raises(ValueError, match=r"holds a corpus of .*'seed': 7"):
        synthesize(SynthesisConfig(seed=8), directory)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="no synthetic corpus"):
        synthesize(TINY, tmp_path)


@pytest.mark.parametrize("package", ["espeakng_loader", "pyroomacoustics"])
def test_missing_demo_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the demo extra, the message says what to install, and the command exits with 1."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}: .*pip install 'megahour\[demo\]'"):
        synthesize(TINY, tmp_path / "corpus")
    assert main(["--out", str(tmp_path / "corpus")]) == 1


@pytest.mark.chaos
def test_unfinished_corpus_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails midway leaves neither the directory nor scratch files."""

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("jobs.synthesis.corpus.write_tables", fail)
    with pytest.raises(OSError, match="disk full"):
        synthesize(TINY, tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []


def test_heldout_variants_and_accents_are_unseen() -> None:
    """No held-out speaker shares a voice variant or an accent with any speaker of training."""
    speakers = draw_speakers(SynthesisConfig())
    training = (*speakers["labelled"], *speakers["unlabelled"])
    heldout = speakers["heldout"]
    assert not {each.variant for each in heldout} & {each.variant for each in training}
    assert not {each.accent for each in heldout} & {each.accent for each in training}
    assert len({each.speaker_id for each in (*training, *heldout)}) == 144
    assert len({each.variant for each in speakers["unlabelled"]}) > 60


def test_subsets_hold_what_was_asked_for(corpus: tuple[Path, SynthesisSummary]) -> None:
    """Hours reach their budget within an utterance a speaker; placements are evenly held out."""
    directory, summary = corpus
    assert 0.004 <= summary.hours["labelled"] <= 0.004 + 2 * 6 / 3600
    assert 0.008 <= summary.hours["unlabelled"] <= 0.008 + 3 * 6 / 3600
    heldout = set((directory / "heldout.speakers").read_text().split())
    speaker_of, counts = table(directory, "utt2spk"), defaultdict(int)
    for utterance_id, placement in table(directory, "utt2placement").items():
        counts[placement] += speaker_of[utterance_id] in heldout
    assert counts == {place.name: 3 for place in PLACEMENTS}


def test_no_transcript_of_the_unlabelled_is_written(directory: Path) -> None:
    """The file `text` has lines of the labelled and the held-out utterances alone."""
    silent = set((directory / "unlabelled.speakers").read_text().split())
    speaker_of = table(directory, "utt2spk")
    expected = {utterance_id for utterance_id, who in speaker_of.items() if who not in silent}
    assert table(directory, "text").keys() == expected


def test_every_word_has_pronunciations_in_the_phone_inventory(directory: Path) -> None:
    """The lexicon covers grammar and transcripts, by one to three distinct strings of phones."""
    pronunciations = defaultdict(list)
    for line in (directory / "lexicon.txt").read_text().splitlines():
        word, *phones = line.split()
        assert phones
        assert set(phones) <= set(PHONES) - {"SIL"}
        pronunciations[word].append(tuple(phones))
    said = {word for text in table(directory, "text").values() for word in text.split()}
    assert said <= pronunciations.keys() == set(vocabulary())
    assert all(len(set(some)) == len(some) <= 3 for some in pronunciations.values())


def test_phone_times_cover_the_audio(directory: Path) -> None:
    """Each utterance's phones follow one another from 0 to the end of its 16 kHz mono file."""
    phones_of = defaultdict(list)
    for line in (directory / "phones.ctm").read_text().splitlines():
        utterance_id, _, start, duration, phone = line.split()
        phones_of[utterance_id].append((float(start), float(duration), phone))
    audio_of = table(directory, "wav.scp")
    assert phones_of.keys() == audio_of.keys()
    for utterance_id, phones in phones_of.items():
        info = soundfile.info(directory / audio_of[utterance_id])
        assert (info.samplerate, info.channels, info.subtype) == (16_000, 1, "PCM_16")
        starts, durations, names = zip(*phones, strict=True)
        assert starts[0] == 0.0
        assert names[0] == names[-1] == "SIL"
        assert len(names) > 5
        np.testing.assert_allclose(np.add(starts, durations)[:-1], starts[1:], atol=2e-4)
        assert starts[-1] + durations[-1] == pytest.approx(info.duration, abs=2e-4)


def test_phone_times_are_true(directory: Path) -> None:
    """At DP1, vowels are over 10 dB louder than the silence before the first word."""
    placement_of, audio_of = table(directory, "utt2placement"), table(directory, "wav.scp")
    levels = defaultdict(list)
    samples = {
        key: soundfile.read(directory / audio_of[key])[0]
        for key, placement in placement_of.items()
        if placement == "DP1"
    }
    for line in (directory / "phones.ctm").read_text().splitlines():
        key, _, start, duration, phone = line.split()
        if key in samples and (phone in {"AA", "AE", "AY", "EY", "IY"} or float(start) == 0.0):
            first = round(16_000 * float(start))
            part = samples[key][first : first + round(16_000 * float(duration))]
            loudness_db = 10 * np.log10(np.mean(part**2)) - 10 * np.log10(
                np.mean(samples[key] ** 2)
            )
            levels["SIL" if float(start) == 0.0 else "vowel"].append(loudness_db)
    assert np.median(levels["vowel"]) > np.median(levels["SIL"]) + 10


def test_reverberation_grows_with_the_placement() -> None:
    """Decay times (Schroeder) rise and are near the placement's; direct-to-reverberant falls."""
    decays_s, ratios_db = [], []
    for place in PLACEMENTS:
        generator = np.random.default_rng(3)
        responses = [
            draw_impulse_response(place.distance_m, place.reverberation_time_s, generator)
            for _ in range(2)
        ]
        assert all(response[0] == 1.0 for response in responses)
        decays_s.append(np.mean([decay_time_s(response) for response in responses]))
        ratios_db.append(np.mean([direct_to_reverberant_db(each) for each in responses]))
    assert decays_s == sorted(decays_s)
    assert ratios_db == sorted(ratios_db, reverse=True)
    nominal = [place.reverberation_time_s for place in PLACEMENTS]
    np.testing.assert_allclose(decays_s, nominal, rtol=0.25)


def test_signal_to_noise_ratio_is_the_placements() -> None:
    """Each placement's noise lies exactly its decibels below the reverberant speech; they fall."""
    acoustics = tiny_acoustics()
    speech = np.random.default_rng(1).normal(size=8000).astype(np.float32)
    for place in PLACEMENTS:
        heard = reverberate(speech, place, acoustics, np.random.default_rng(2))
        noise = noise_for(heard, place, acoustics, np.random.default_rng(2))
        ratio_db = 10 * np.log10(np.mean(heard**2) / np.mean(noise**2))
        assert ratio_db == pytest.approx(place.signal_to_noise_db, abs=0.01)
    ratios_db = [place.signal_to_noise_db for place in PLACEMENTS]
    assert ratios_db == sorted(ratios_db, reverse=True)


def test_recordings_never_clip() -> None:
    """A peaky signal comes out below full scale."""
    speech = np.zeros(8000, np.float32)
    speech[4000] = 50.0
    heard = record(speech, PLACEMENTS[0], tiny_acoustics(), np.random.default_rng(0))
    assert float(np.abs(heard).max()) <= 0.9 + 1e-6


def test_training_and_heldout_hear_other_rooms_and_noise(tmp_path: Path) -> None:
    """Acoustics survive saving, and two draws share neither response nor noise."""
    first, second = tiny_acoustics(0), tiny_acoustics(1)
    first.save(tmp_path / "first.npz")
    loaded = Acoustics.load(tmp_path / "first.npz")
    for name, responses in first.impulse_responses.items():
        for ours, read, other in zip(
            responses, loaded.impulse_responses[name], second.impulse_responses[name], strict=True
        ):
            np.testing.assert_array_equal(ours, read)
            assert not np.array_equal(ours[:1000], other[:1000])
    np.testing.assert_array_equal(loaded.noises, first.noises)


def test_sentences_are_of_the_vocabulary_and_hardly_repeat() -> None:
    """2,000 draws use every word, and most of them occur once."""
    generator = np.random.default_rng(0)
    texts = [draw_sentence(generator) for _ in range(2000)]
    assert {word for text in texts for word in text.split()} == set(vocabulary())
    assert 150 <= len(vocabulary()) <= 250
    assert len(set(texts)) > 1500


def test_phone_inventory_is_small_and_named_in_ascii() -> None:
    """45 phones, upper-case letters only; marks are no phone; an unknown mnemonic is named."""
    assert len(PHONES) == len(set(PHONES)) == 45
    assert all(name.isascii() and name.isalpha() and name.isupper() for name in PHONES)
    assert phone_name("'A:") == "AA"
    assert phone_name(";") is None
    with pytest.raises(ValueError, match="phoneme 'Q'"):
        phone_name("Q")


def test_each_heldout_speaker_needs_an_utterance_a_placement() -> None:
    """The message names the value and its bound."""
    with pytest.raises(ValueError, match="heldout_utterances_per_placement = 3: need at least 12"):
        SynthesisConfig(heldout_utterances_per_placement=3)


def test_command_exits_with_2_for_bad_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command tells the bound on standard error and prints nothing else."""
    assert main(["--out", str(tmp_path / "corpus"), "--labelled-hours", "0"]) == 2
    printed = capsys.readouterr()
    assert "labelled_hours = 0.0: need 1e-06..1000" in printed.err
    assert printed.out == ""


@cache
def tiny_acoustics(seed: int = 0) -> Acoustics:
    generator = np.random.default_rng(seed)
    noises = tuple(generator.normal(size=(3, 16_000)).astype(np.float32))
    return draw_rooms(noises, generator)


def decay_time_s(response: np.ndarray) -> float:
    """Time to fall by 60 dB, from the Schroeder curve between -5 and -25 dB."""
    energy = np.cumsum(response[::-1].astype(np.float64) ** 2)[::-1]
    level_db = 10 * np.log10(energy / energy[0])
    return 3 * float(np.argmax(level_db < -25) - np.argmax(level_db < -5)) / 16_000


def direct_to_reverberant_db(response: np.ndarray) -> float:
    squares = response.astype(np.float64) ** 2
    return float(10 * np.log10(squares[:40].sum() / squares[40:].sum()))
