"""Compute cepstra of stored log-mel energies."""

import numpy as np
import pytest

from training.align.monophone_hmm import cepstra, speaker_cepstra
from training.decode.senones import TranscribedUtterance


def test_cosine_transform_against_its_definition() -> None:
    """Cepstra are c_k = s_k sum_n x_n cos(pi k (2n + 1) / 2N), orthonormal."""
    energies = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    k, n = np.arange(13)[:, np.newaxis], np.arange(64)
    scale = np.where(k == 0, np.sqrt(1 / 64), np.sqrt(2 / 64))
    expected = energies @ (scale * np.cos(np.pi * k * (2 * n + 1) / 128)).T
    np.testing.assert_allclose(cepstra(energies)[:, :13], expected, atol=1e-5)


def test_derivative_of_a_ramp_is_its_slope() -> None:
    """Away from the edges, the first derivative is exact and the second is zero."""
    energies = np.outer(np.arange(20), np.ones(64)).astype(np.float32)
    values = cepstra(energies)
    np.testing.assert_allclose(values[4:-4, 13], values[1, 0] - values[0, 0], rtol=1e-5)
    np.testing.assert_allclose(values[4:-4, 26], 0, atol=1e-5)


def test_each_speaker_has_mean_zero_and_variance_one() -> None:
    """All frames of a speaker together have mean 0 and variance 1, for any channel."""
    random = np.random.default_rng(1)
    utterances = [
        TranscribedUtterance(f"{speaker}-{i}", speaker, ("a",), features.astype(np.float32))
        for speaker, offset in (("x", 3.0), ("y", -9.0))
        for i, features in enumerate(random.normal(offset, 2, size=(3, 50, 64)))
    ]
    normalized = speaker_cepstra(utterances)
    for speaker in "xy":
        frames = np.concatenate([v for name, v in normalized.items() if name[0] == speaker])
        assert frames.mean(axis=0) == pytest.approx(np.zeros(39), abs=1e-4)
        assert frames.std(axis=0) == pytest.approx(np.ones(39), abs=1e-3)
