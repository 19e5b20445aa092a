"""The bootstrap's cepstra, mixtures and alignments of real speech."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import logsumexp

from pipeline.audio.decode import decode_audio
from pipeline.filterbank import NUM_BINS
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.normalization import CausalMean
from pipeline.shards import FeatureRow
from tests.training.align.by_monophones import align_by_monophones, row_of
from training.align.monophone_hmm import Mixture, cepstra, log_likelihoods, speaker_cepstra
from training.decode.lexicon import Lexicon, parse_lexicon
from training.decode.senones import PhoneAlignment, Unaligned
from training.settings.decoding import BootstrapConfig

NUM_SPEAKERS = 2


@pytest.fixture(scope="module")
def lexicon(an4_dir: Path) -> Lexicon:
    return parse_lexicon((an4_dir / "lexicon.txt").read_text())


@pytest.fixture(scope="module")
def utterances(an4_dir: Path) -> list[FeatureRow]:
    """Return the labelled utterances of a few speakers of AN4, as the feature shards hold them."""
    speakers = (an4_dir / "labelled.speakers").read_text().split()[:NUM_SPEAKERS]
    speaker_of = _table(an4_dir / "utt2spk")
    paths, texts = _table(an4_dir / "wav.scp"), _table(an4_dir / "text")
    means: defaultdict[str, CausalMean] = defaultdict(CausalMean)
    return [
        row_of(
            name,
            speaker_of[name],
            texts[name],
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
def aligned(utterances: list[FeatureRow], lexicon: Lexicon) -> dict[str, PhoneAlignment]:
    found = align_by_monophones(utterances, lexicon, BootstrapConfig(num_iterations=8))
    return {name: each for name, each in found.items() if isinstance(each, PhoneAlignment)}


def test_every_utterance_is_aligned_to_its_own_words(
    utterances: list[FeatureRow], lexicon: Lexicon, aligned: dict[str, PhoneAlignment]
) -> None:
    """Without its silences, an alignment spells a pronunciation of the transcript."""
    assert aligned.keys() == {each.utterance_id for each in utterances}
    for utterance in utterances:
        alignment = aligned[utterance.utterance_id]
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
    utterances: list[FeatureRow], aligned: dict[str, PhoneAlignment]
) -> None:
    """Nearly all utterances begin and end in silence, far below the speech in energy."""
    num_silent_edges, drops = 0, []
    for utterance in utterances:
        alignment = aligned[utterance.utterance_id]
        silent = np.repeat(alignment.phones == 0, alignment.durations)
        num_silent_edges += int(silent[0]) + int(silent[-1])
        energy = utterance.features.mean(axis=1)
        if silent.any():
            drops.append(energy[~silent].mean() - energy[silent].mean())
    assert num_silent_edges >= 0.95 * 2 * len(utterances)
    # Natural log of energy: 2 is 9 dB.
    assert np.quantile(drops, 0.1) > 2


def test_utterances_that_cannot_be_aligned_are_named(
    utterances: list[FeatureRow], lexicon: Lexicon
) -> None:
    """Of utterances too short or without words the reason is told; unknown words are refused."""
    good = utterances[0]
    short = replace(good, utterance_id="short", features=good.features[:5])
    silent = replace(good, utterance_id="silent", text="")
    config = BootstrapConfig(num_iterations=1)
    found = align_by_monophones([good, short, silent], lexicon, config)
    assert isinstance(found[good.utterance_id], PhoneAlignment)
    assert isinstance(found["short"], Unaligned)
    assert "5 frames: need" in found["short"].detail
    assert found["silent"] == Unaligned("no words: need a transcript to align")
    with pytest.raises(ValueError, match=r"none of 1 utterances can be aligned.*: no words"):
        align_by_monophones([silent], lexicon, config)
    unknown = replace(good, utterance_id="u", text="XYZZY")
    with pytest.raises(ValueError, match=r"'XYZZY'.*lexicon\.txt"):
        align_by_monophones([good, unknown], lexicon, BootstrapConfig())
    with pytest.raises(ValueError, match="max_gaussians = 0"):
        BootstrapConfig(max_gaussians=0)


def _mixture(num_gaussians: int, random: np.random.Generator) -> Mixture:
    weights = random.random(num_gaussians)
    return Mixture(
        weights / weights.sum(),
        random.normal(size=(num_gaussians, 4)),
        0.5 + random.random((num_gaussians, 4)),
    )


def _total(frames: np.ndarray, mixture: Mixture) -> float:
    return float(log_likelihoods(frames, [mixture]).sum())


def test_log_likelihoods_against_scipy() -> None:
    """Log-likelihoods equal SciPy's weighted sums of normal densities, for several sizes."""
    from scipy.stats import norm  # noqa: PLC0415 - 2 s, for this test alone

    random = np.random.default_rng(0)
    mixtures = [_mixture(size, random) for size in (1, 3, 2)]
    frames = random.normal(size=(300, 4)).astype(np.float32)
    for state, mixture in enumerate(mixtures):
        densities = norm.logpdf(frames[:, None], mixture.means, np.sqrt(mixture.variances))
        expected = logsumexp(densities.sum(axis=2) + np.log(mixture.weights), axis=1)
        np.testing.assert_allclose(log_likelihoods(frames, mixtures)[:, state], expected, atol=1e-4)


def test_expectation_maximization_raises_the_likelihood() -> None:
    """No re-estimation loses likelihood, and two Gaussians fit two clusters better than one."""
    random = np.random.default_rng(1)
    frames = np.concatenate([random.normal(c, 1, size=(200, 4)) for c in (-3, 3)])
    frames = frames.astype(np.float32)
    one = Mixture.standard(4).reestimate(frames)
    np.testing.assert_allclose(one.means[0], frames.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(one.variances[0], frames.var(axis=0), rtol=1e-4)
    two = one.split(2)
    scores = [_total(frames, two)]
    for _ in range(6):
        two = two.reestimate(frames)
        scores.append(_total(frames, two))
    assert np.diff(scores).min() > -0.1
    assert scores[-1] > _total(frames, one) + 300


def test_cosine_transform_against_its_definition() -> None:
    """Cepstra are c_k = s_k sum_n x_n cos(pi k (2n + 1) / 2N), orthonormal."""
    energies = np.random.default_rng(0).normal(size=(5, NUM_BINS)).astype(np.float32)
    k, n = np.arange(13)[:, np.newaxis], np.arange(NUM_BINS)
    scale = np.where(k == 0, np.sqrt(1 / NUM_BINS), np.sqrt(2 / NUM_BINS))
    expected = energies @ (scale * np.cos(np.pi * k * (2 * n + 1) / (2 * NUM_BINS))).T
    np.testing.assert_allclose(cepstra(energies)[:, :13], expected, atol=1e-5)


def test_derivative_of_a_ramp_is_its_slope() -> None:
    """Away from the edges, the first derivative is exact and the second is zero."""
    energies = np.outer(np.arange(20), np.ones(NUM_BINS)).astype(np.float32)
    values = cepstra(energies)
    np.testing.assert_allclose(values[4:-4, 13], values[1, 0] - values[0, 0], rtol=1e-5)
    np.testing.assert_allclose(values[4:-4, 26], 0, atol=1e-5)


def test_each_speaker_has_mean_zero_and_variance_one() -> None:
    """All frames of a speaker together have mean 0 and variance 1, for any channel."""
    random = np.random.default_rng(1)
    utterances = [
        row_of(f"{speaker}-{i}", speaker, "a", features)
        for speaker, offset in (("x", 3.0), ("y", -9.0))
        for i, features in enumerate(random.normal(offset, 2, size=(3, 50, NUM_BINS)))
    ]
    normalized = speaker_cepstra(utterances)
    for speaker in "xy":
        frames = np.concatenate([v for name, v in normalized.items() if name[0] == speaker])
        assert frames.mean(axis=0) == pytest.approx(np.zeros(39), abs=1e-4)
        assert frames.std(axis=0) == pytest.approx(np.ones(39), abs=1e-3)
