"""Compute cepstra with deltas from stored log-mel energies, for the bootstrap and the tree.

The feature shards hold no audio; a cosine transform of their energies gives the HMM's features.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Float32
from scipy.fft import dct

from training.decoding.alignment import TranscribedUtterance

NUM_CEPSTRA = 13
MIN_STANDARD_DEVIATION = 0.01


def cepstra(energies: Float32[np.ndarray, "frames bins"]) -> Float32[np.ndarray, "frames 39"]:
    """Compute the first 13 cepstral coefficients with first and second derivatives."""
    # The cosine transform decorrelates neighbouring bins, as diagonal Gaussians assume.
    static = dct(energies.astype(np.float64), axis=1, norm="ortho")[:, :NUM_CEPSTRA]
    first = _derivative(static)
    return np.concatenate([static, first, _derivative(first)], axis=1).astype(np.float32)


def _derivative(
    values: Float[np.ndarray, "frames coefficients"],
) -> Float[np.ndarray, "frames coefficients"]:
    # Linear regression over two frames on each side: sum_k k (c[t+k] - c[t-k]) / (2 sum_k k^2).
    padded = np.pad(values, ((2, 2), (0, 0)), mode="edge")
    near, far = padded[3:-1] - padded[1:-3], padded[4:] - padded[:-4]
    derivative: Float[np.ndarray, "frames coefficients"] = (near + 2 * far) / 10
    return derivative


def speaker_cepstra(
    utterances: Iterable[TranscribedUtterance],
) -> dict[str, Float32[np.ndarray, "frames 39"]]:
    """Return cepstra by utterance id, with each speaker's mean 0 and standard deviation 1."""
    by_speaker: dict[str, list[TranscribedUtterance]] = {}
    for utterance in utterances:
        by_speaker.setdefault(utterance.speaker_id, []).append(utterance)
    return {
        utterance_id: normalized
        for spoken in by_speaker.values()
        for utterance_id, normalized in _normalized(spoken).items()
    }


def _normalized(
    utterances: Sequence[TranscribedUtterance],
) -> dict[str, Float32[np.ndarray, "frames 39"]]:
    raw = {utterance.utterance_id: cepstra(utterance.features) for utterance in utterances}
    # Energies still vary with the causal mean, so all of a speaker's utterances are pooled.
    frames = np.concatenate(list(raw.values())).astype(np.float64)
    mean = frames.mean(axis=0)
    deviation = np.maximum(frames.std(axis=0), MIN_STANDARD_DEVIATION)
    return {
        utterance_id: ((values - mean) / deviation).astype(np.float32)
        for utterance_id, values in raw.items()
    }
