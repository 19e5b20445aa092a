"""Simulate five placements of the device, DP1 (easy) to DP5 (hard), as in Table II of 003."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from jaxtyping import Float32

from pipeline.filterbank import SAMPLE_RATE_HZ

NUM_ROOMS = 4
"""The rooms of each placement."""
_PEAK = 0.9

Samples = Float32[np.ndarray, " samples"]
Sound = Float32[np.ndarray, " _samples"]
"""A room's response, or a noise: each of its own length."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement holds the distance of the speaker, the reverberation time and the noise level."""

    name: str
    distance_m: float
    reverberation_time_s: float
    signal_to_noise_db: float


PLACEMENTS = (
    # The paper gives the room no figures (003 VII-B): distances, RT60 and SNR are ours.
    Placement("DP1", 1.0, 0.25, 25.0),
    Placement("DP2", 2.0, 0.35, 18.0),
    Placement("DP3", 3.0, 0.45, 14.0),
    Placement("DP4", 3.5, 0.55, 10.0),
    Placement("DP5", 4.5, 0.70, 5.0),
)
PLACEMENTS_BY_NAME = {placement.name: placement for placement in PLACEMENTS}


@dataclass(frozen=True)
class Acoustics:
    """Acoustics holds the rooms of each placement and the noises that many utterances share."""

    impulse_responses: dict[str, tuple[Sound, ...]]
    noises: tuple[Sound, ...]

    def save(self, file: Path | io.BytesIO) -> None:
        """Write the acoustics as .npz, for other processes; the same ones give the same bytes."""
        rooms = {
            f"{name}-{index}": response
            for name, responses in self.impulse_responses.items()
            for index, response in enumerate(responses)
        }
        noises = {f"noise-{index}": noise for index, noise in enumerate(self.noises)}
        # NumPy 2.0 has no allow_pickle, for whose value its types take these.
        np.savez(file, **rooms, **noises)  # type: ignore[arg-type]

    @classmethod
    def load(cls, file: Path | io.BytesIO) -> "Acoustics":
        """Read what `save` wrote."""
        with np.load(file) as arrays:
            responses = {
                place.name: tuple(arrays[f"{place.name}-{room}"] for room in range(NUM_ROOMS))
                for place in PLACEMENTS
            }
            num_noises = sum(name.startswith("noise-") for name in arrays)
            noises = tuple(arrays[f"noise-{index}"] for index in range(num_noises))
        return cls(responses, noises)


def reverberate(
    speech: Samples, placement: Placement, acoustics: Acoustics, generator: np.random.Generator
) -> Samples:
    """Convolve the speech with one room of the placement; the direct sound is not delayed."""
    # Here, as ingestion without placements has this module, and scipy.signal takes a second.
    from scipy.signal import fftconvolve  # noqa: PLC0415

    responses = acoustics.impulse_responses[placement.name]
    response = responses[generator.integers(len(responses))]
    return np.asarray(fftconvolve(speech, response)[: len(speech)], np.float32)


def noise_for(
    speech: Samples, placement: Placement, acoustics: Acoustics, generator: np.random.Generator
) -> Samples:
    """Cut noise as long as the speech, at the placement's signal-to-noise ratio."""
    noise = acoustics.noises[generator.integers(len(acoustics.noises))]
    if len(noise) < len(speech):
        noise = np.resize(noise, len(speech))  # from its beginning again
    start = generator.integers(len(noise) - len(speech) + 1)
    cut = noise[start : start + len(speech)]
    # Decibels are of power, so an amplitude takes 20 of them for a factor of 10.
    level = 10 ** (-placement.signal_to_noise_db / 20) * _root_mean_square(speech)
    return np.asarray(level / _root_mean_square(cut) * cut, np.float32)


def record(
    speech: Samples, placement: Placement, acoustics: Acoustics, generator: np.random.Generator
) -> Samples:
    """Record the speech as the device hears it, at a level of -35 to -20 dB, never clipped."""
    reverberant = reverberate(speech, placement, acoustics, generator)
    heard = reverberant + noise_for(reverberant, placement, acoustics, generator)
    level = 10 ** (generator.uniform(-35.0, -20.0) / 20)
    gain = min(level / _root_mean_square(heard), _PEAK / float(np.abs(heard).max()))
    return np.asarray(gain * heard, np.float32)


def record_flac(speech: Samples, placement: str, acoustics: Acoustics, seed: int) -> bytes:
    """Record speech in the placement of this name, as FLAC; the seed draws room, noise, level."""
    generator = np.random.default_rng(seed)
    heard = record(speech, PLACEMENTS_BY_NAME[placement], acoustics, generator)
    file = io.BytesIO()
    soundfile.write(file, heard, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def _root_mean_square(samples: Samples) -> float:
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
