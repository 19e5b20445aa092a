"""Make the bootstrap alignment of real speech."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from pipeline.audio.decode import decode_audio
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.normalization import CausalMean
from training.align.monophone_hmm import Bootstrap, bootstrap_alignment
from training.decode.lexicon import Lexicon, parse_lexicon
from training.decode.senones import TranscribedUtterance
from training.settings.decoding import BootstrapConfig

NUM_SPEAKERS = 2


@pytest.fixture(scope="module")
def lexicon(an4_dir: Path) -> Lexicon:
    return parse_lexicon((an4_dir / "lexicon.txt").read_text())


@pytest.fixture(scope="module")
def utterances(an4_dir: Path) -> list[TranscribedUtterance]:
    """Return the labelled utterances of a few speakers of AN4, as the feature shards hold them."""
    speakers = (an4_dir / "labelled.speakers").read_text().split()[:NUM_SPEAKERS]
    speaker_of = _table(an4_dir / "utt2spk")
    paths, texts = _table(an4_dir / "wav.scp"), _table(an4_dir / "text")
    means: defaultdict[str, CausalMean] = defaultdict(CausalMean)
    return [
        TranscribedUtterance(
            name,
            speaker_of[name],
            tuple(texts[name].split()),
            means[speaker_of[name]].subtract(
                log_mel_energies(decode_audio((an4_dir / paths[name]).read_bytes()))
            ),
        )
        for name in sorted(texts)
        if speaker_of[name] in speakers
    ]


def _table(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in path.read_text().splitlines())


@pytest.fixture(scope="module")
def bootstrap(utterances: list[TranscribedUtterance], lexicon: Lexicon) -> Bootstrap:
    return bootstrap_alignment(utterances, lexicon, BootstrapConfig(num_iterations=8))


def test_every_utterance_is_aligned_to_its_own_words(
    utterances: list[TranscribedUtterance], lexicon: Lexicon, bootstrap: Bootstrap
) -> None:
    """Without its silences, an alignment spells a pronunciation of the transcript."""
    assert bootstrap.failures == {}
    for utterance in utterances:
        alignment = bootstrap.alignments[utterance.utterance_id]
        assert alignment.num_frames == len(utterance.features)
        assert alignment.durations.min() >= 3
        remaining = {tuple(p for p in alignment.phones.tolist() if p != 0)}
        for word in utterance.words:
            variants = [
                tuple(lexicon.phone_ids[phone] for phone in pronunciation)
                for pronunciation in lexicon.pronunciations[word]
            ]
            remaining = {
                spoken[len(v) :] for spoken in remaining for v in variants if spoken[: len(v)] == v
            }
        assert () in remaining


def test_silence_lies_at_the_edges_where_energy_is_low(
    utterances: list[TranscribedUtterance], bootstrap: Bootstrap
) -> None:
    """Nearly all utterances begin and end in silence, far below the speech in energy."""
    num_silent_edges, drops = 0, []
    for utterance in utterances:
        alignment = bootstrap.alignments[utterance.utterance_id]
        silent = np.repeat(alignment.phones == 0, alignment.durations)
        num_silent_edges += int(silent[0]) + int(silent[-1])
        energy = utterance.features.mean(axis=1)
        if silent.any():
            drops.append(energy[~silent].mean() - energy[silent].mean())
    assert num_silent_edges >= 0.95 * 2 * len(utterances)
    # Natural log of energy: 2 is 9 dB.
    assert np.quantile(drops, 0.1) > 2


def test_alignments_are_reproducible(
    utterances: list[TranscribedUtterance], lexicon: Lexicon
) -> None:
    """Two runs in one process give the same alignments bit for bit."""
    config = BootstrapConfig(num_iterations=3)
    first, second = (bootstrap_alignment(utterances[:12], lexicon, config) for _ in range(2))
    for name, alignment in first.alignments.items():
        np.testing.assert_array_equal(alignment.phones, second.alignments[name].phones)
        np.testing.assert_array_equal(alignment.starts, second.alignments[name].starts)


def test_utterances_that_cannot_be_aligned_are_named(
    utterances: list[TranscribedUtterance], lexicon: Lexicon
) -> None:
    """Utterances too short or without words are returned as failures; unknown words are refused."""
    good = utterances[0]
    short = TranscribedUtterance("short", good.speaker_id, good.words, good.features[:5])
    silent = TranscribedUtterance("silent", good.speaker_id, (), good.features)
    done = bootstrap_alignment([good, short, silent], lexicon, BootstrapConfig(num_iterations=1))
    assert set(done.alignments) == {good.utterance_id}
    assert "5 frames: need" in done.failures["short"]
    assert "no words" in done.failures["silent"]
    unknown = TranscribedUtterance("u", good.speaker_id, ("XYZZY",), good.features)
    with pytest.raises(ValueError, match=r"'XYZZY'.*lexicon\.txt"):
        bootstrap_alignment([good, unknown], lexicon, BootstrapConfig())
    with pytest.raises(ValueError, match="max_gaussians = 0"):
        BootstrapConfig(max_gaussians=0)
