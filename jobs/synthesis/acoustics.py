"""Draw room impulse responses by the image method, and household noise of unit power.

Each response is of another room. The noises are babble, pink noise, and music-like tones.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from jobs.synthesis.sentences import draw_sentence
from jobs.synthesis.speech import SpeechSynthesizer, import_pyroomacoustics
from pipeline.audio.placements import NUM_ROOMS, PLACEMENTS, Acoustics, Sound
from pipeline.filterbank import SAMPLE_RATE_HZ

# Beyond order 40 a 0.70 s room gains nothing (0.75 for 0.79 s measured) and takes 40 x as long.
_MAX_ORDER = 40
_TYPICAL_ROOM_M = np.array([6.0, 5.0, 2.8])
_WALL_CLEARANCE_M = 0.25


def draw_rooms(noises: tuple[Sound, ...], generator: np.random.Generator) -> Acoustics:
    """Draw four rooms for each placement, in which these noises are heard."""
    responses = {
        place.name: tuple(
            draw_impulse_response(place.distance_m, place.reverberation_time_s, generator)
            for _ in range(NUM_ROOMS)
        )
        for place in PLACEMENTS
    }
    return Acoustics(responses, noises)


def draw_impulse_response(
    distance_m: float, reverberation_time_s: float, generator: np.random.Generator
) -> Float32[np.ndarray, " taps"]:
    """Draw a room of about 6 x 5 x 2.8 m, a device and a speaker `distance_m` apart in it.

    The direct sound is tap 0 and has the value 1; the response lasts `reverberation_time_s`.
    """
    acoustics = import_pyroomacoustics()
    size_m = _TYPICAL_ROOM_M * generator.uniform(0.92, 1.08, 3)
    source, microphone = _draw_positions(distance_m, size_m, generator)
    # Sabine's formula, inverted, gives the walls' absorption for this RT60.
    absorption, order = acoustics.inverse_sabine(reverberation_time_s, size_m)
    room = acoustics.ShoeBox(
        size_m,
        fs=SAMPLE_RATE_HZ,
        materials=acoustics.Material(absorption),
        max_order=min(order, _MAX_ORDER),
    )
    room.add_source(source)
    room.add_microphone(microphone)
    room.compute_rir()
    response = np.asarray(room.rir[0][0])
    # Without the direct sound's delay the phones keep their times.
    direct = round(distance_m / acoustics.constants.get("c") * SAMPLE_RATE_HZ)
    direct += acoustics.constants.get("frac_delay_length") // 2
    kept = response[direct : direct + round(reverberation_time_s * SAMPLE_RATE_HZ)]
    return np.asarray(kept / kept[0], np.float32)


def _draw_positions(
    distance_m: float, size_m: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    low, high = _WALL_CLEARANCE_M, size_m - _WALL_CLEARANCE_M
    while True:
        mouth = generator.uniform(low, high)
        mouth[2] = generator.uniform(1.2, 1.8)
        device = generator.uniform(low, high)
        device[2] = generator.uniform(0.6, 1.4)
        separation = device - mouth
        device = mouth + separation * distance_m / np.linalg.norm(separation)
        if (device > low).all() and (device < high).all():
            return mouth, device


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
