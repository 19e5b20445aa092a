import numpy as np
import pytest
import scipy.signal
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import log_mel_energies, num_frames


def mel(frequency_hz: np.ndarray | float) -> np.ndarray:
    return 1127 * np.log(1 + np.asarray(frequency_hz) / 700)


def mel_weights() -> np.ndarray:
    """Triangles of equal width in mel between 20 and 8000 Hz, as weights of 256 FFT bins."""
    edges = np.linspace(mel(20), mel(8000), 66)
    bins = mel(np.arange(256) * 16000 / 512)[:, np.newaxis]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling))


def reference(samples: np.ndarray) -> np.ndarray:
    """The equations in float64: DC removal, pre-emphasis, Povey window, power, mel, log."""
    scaled = samples.astype(np.float64) * 32768
    windows = np.lib.stride_tricks.sliding_window_view(scaled, 400)[::160]
    centred = windows - windows.mean(axis=1, keepdims=True)
    previous = np.concatenate([centred[:, :1], centred[:, :-1]], axis=1)
    povey = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    spectrum = np.fft.rfft((centred - 0.97 * previous) * povey, 512)[:, :256]
    return np.log(np.maximum(np.abs(spectrum) ** 2 @ mel_weights(), np.finfo(np.float32).eps))


def speech_like(num_samples: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal(num_samples)
    coloured = scipy.signal.lfilter([1], [1, -0.9], noise) * 0.05
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(num_samples) / 16000)
    return (coloured + tone + 0.01).astype(np.float32)


@settings(max_examples=20)
@given(st.integers(400, 8000), st.integers(0, 1000))
def test_the_equations_give_the_same_energies(num_samples: int, seed: int) -> None:
    """Kaldi's float32 arithmetic stays within 2e-3 of the equations in float64."""
    samples = speech_like(num_samples, seed)
    difference = np.abs(log_mel_energies(samples) - reference(samples))
    assert difference.max() < 2e-3
    assert np.quantile(difference, 0.99) < 2e-4


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(0, 0), (399, 0), (400, 1), (559, 1), (560, 2), (16000, 98)]
)
def test_only_whole_windows_count(num_samples: int, expected: int) -> None:
    """1 + (n - 400) // 160 frames, snipped at the edges."""
    assert num_frames(num_samples) == expected
    if expected:
        assert log_mel_energies(speech_like(num_samples, 0)).shape == (expected, 64)


def test_a_tone_peaks_at_its_own_bin() -> None:
    """1 kHz is loudest in the bin whose centre is nearest to it in mel."""
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(8000) / 16000)
    centres = np.linspace(mel(20), mel(8000), 66)[1:-1]
    nearest = np.abs(centres - mel(1000)).argmin()
    energies = log_mel_energies(tone.astype(np.float32))
    assert (np.abs(energies.argmax(axis=1) - nearest) <= 1).all()


def test_repeating_gives_the_same_bits() -> None:
    """No dither."""
    samples = speech_like(4000, 3)
    assert log_mel_energies(samples).tobytes() == log_mel_energies(samples).tobytes()


def test_frames_come_from_their_own_window_only() -> None:
    """A later start by one shift drops the first frame and nothing else."""
    samples = speech_like(4000, 4)
    assert log_mel_energies(samples)[1:].tobytes() == log_mel_energies(samples[160:]).tobytes()


def test_less_than_a_window_is_refused() -> None:
    """The error names the bound."""
    with pytest.raises(ValueError, match="399 samples: need 400"):
        log_mel_energies(np.zeros(399, dtype=np.float32))
