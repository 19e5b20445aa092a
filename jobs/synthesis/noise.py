"""Make household noise of unit power: babble, pink noise, and music-like tones."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from jobs.synthesis.sentences import draw_sentence
from jobs.synthesis.speech import SpeechSynthesizer
from pipeline.filterbank import SAMPLE_RATE_HZ

NUM_TALKERS = 5
_NOTE_S = 0.25
_NUM_VOICES = 4

Noise = Float32[np.ndarray, " samples"]


def draw_talkers(voices: Sequence[str], generator: np.random.Generator) -> list[str]:
    """Draw five of the voices."""
    talkers: list[str] = generator.permutation(np.asarray(voices))[:NUM_TALKERS].tolist()
    return talkers


def babble(voices: Sequence[str], duration_s: float, generator: np.random.Generator) -> Noise:
    """Mix five talkers, each with another of `voices`."""
    num_samples = round(duration_s * SAMPLE_RATE_HZ)
    synthesizer = SpeechSynthesizer()
    mixture = np.zeros(num_samples, np.float32)
    for voice in draw_talkers(voices, generator):
        synthesizer.select_voice(voice, pitch=int(generator.integers(30, 70)))
        talk = np.zeros(0, np.float32)
        while len(talk) < num_samples:
            talk = np.concatenate([talk, synthesizer.speak(draw_sentence(generator)).samples])
        # Talkers of equal power: no one of them is understood alone.
        mixture += talk[:num_samples] / talk.std()
    return _unit_power(mixture)


def pink_noise(duration_s: float, generator: np.random.Generator) -> Noise:
    """Make Gaussian noise whose power falls by 3 dB an octave."""
    num_samples = round(duration_s * SAMPLE_RATE_HZ)
    spectrum = np.fft.rfft(generator.normal(size=num_samples))
    # Pink noise's power falls as 1 / f, so its amplitude falls as the root.
    spectrum /= np.sqrt(np.arange(1, len(spectrum) + 1))
    return _unit_power(np.fft.irfft(spectrum, num_samples))


def tonal_noise(duration_s: float, generator: np.random.Generator) -> Noise:
    """Make four voices of decaying notes with three harmonics each, and a hiss 20 dB below."""
    num_samples = round(duration_s * SAMPLE_RATE_HZ)
    note_samples = round(_NOTE_S * SAMPLE_RATE_HZ)
    time_s = np.arange(note_samples) / SAMPLE_RATE_HZ
    num_notes = -(-num_samples // note_samples)
    music = np.zeros((num_notes, note_samples))
    for _ in range(_NUM_VOICES):
        pitches_hz = 110 * 2 ** (generator.integers(0, 36, num_notes) / 12)
        for harmonic in (1, 2, 3):
            phases = 2 * np.pi * harmonic * np.outer(pitches_hz, time_s)
            music += np.sin(phases) * np.exp(-6 * time_s) / harmonic
    hiss = 0.1 * music.std() * generator.normal(size=num_samples)
    return _unit_power(music.ravel()[:num_samples] + hiss)


def _unit_power(noise: np.ndarray) -> Noise:
    centred = noise - noise.mean()
    return np.asarray(centred / centred.std(), np.float32)
