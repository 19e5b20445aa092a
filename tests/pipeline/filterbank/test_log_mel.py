import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import scipy.signal
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS, Engine
from pipeline.filterbank.log_mel import BLOCK_FRAMES, log_mel_energies, mono_samples, num_frames

ENGINES = get_args(Engine)


def mel(frequency_hz: np.ndarray | float) -> np.ndarray:
    return 1127 * np.log(1 + np.asarray(frequency_hz) / 700)


def mel_weights() -> np.ndarray:
    """Triangles of equal width in mel between 20 and 8000 Hz, as weights of 256 FFT bins."""
    edges = np.linspace(mel(20), mel(8000), NUM_BINS + 2)
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


def assert_equal_engines(signals: Sequence[np.ndarray]) -> None:
    """As many frames; 99.9 % of the differences <= 1e-4, all <= 2e-3."""
    pairs = [(log_mel_energies(x, "fast"), log_mel_energies(x, "kaldi")) for x in signals]
    assert [fast.shape for fast, _ in pairs] == [kaldi.shape for _, kaldi in pairs]
    differences = np.concatenate([np.abs(fast - kaldi).ravel() for fast, kaldi in pairs])
    assert np.quantile(differences, 0.999) <= 1e-4
    assert differences.max() <= 2e-3


def test_the_engines_agree_on_recorded_speech(an4_dir: Path) -> None:
    """Every fifth utterance of AN4; tests.benchmarks.filterbank compares them all."""
    files = sorted((an4_dir / "audio").rglob("*.flac"))[::5]
    assert_equal_engines([soundfile.read(file, dtype="float32")[0] for file in files])


def synthetic(num_samples: int, level: float, offset: float, seed: int) -> np.ndarray:
    """Noise and a tone as strong as it, beside a constant offset, as 16-bit samples."""
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal(num_samples)
    frequency_hz = generator.uniform(20, 8000)
    tone = np.sin(2 * np.pi * frequency_hz * np.arange(num_samples) / 16000)
    signal = np.clip(level * (noise + tone) + offset, -1, 1)
    return (np.round(signal * 32767) / 32768).astype(np.float32)


@settings(max_examples=20)
@given(
    st.integers(400, 3 * BLOCK_FRAMES * 160),
    st.floats(1e-3, 0.3),
    st.floats(-0.05, 0.05),
    st.integers(0, 1000),
)
def test_no_length_level_or_offset_sets_the_engines_apart(
    num_samples: int, level: float, offset: float, seed: int
) -> None:
    """Within 2e-3 everywhere."""
    samples = synthetic(num_samples, level, offset, seed)
    fast, kaldi = (log_mel_energies(samples, engine) for engine in ENGINES)
    assert np.abs(fast - kaldi).max() <= 2e-3


def test_a_constant_offset_costs_both_engines_the_same_digits() -> None:
    """Noise of 3 steps of 16 bits beside half of full scale: no engine keeps four digits."""
    samples = synthetic(32000, 1e-4, 0.5, 0)
    errors = [np.abs(log_mel_energies(samples, engine) - reference(samples)) for engine in ENGINES]
    fast, kaldi = (np.quantile(error, 0.999) for error in errors)
    assert 1e-4 < fast < 4 * kaldi


@pytest.mark.parametrize("engine", ENGINES)
def test_digital_silence_has_the_lowest_energy(engine: Engine) -> None:
    """Zeros give log(2**-23), as in Kaldi, not minus infinity."""
    energies = log_mel_energies(np.zeros(4000, dtype=np.float32), engine)
    np.testing.assert_allclose(energies, np.log(2.0**-23), rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=20)
@given(st.integers(400, 8000), st.integers(0, 1000))
def test_the_equations_give_the_same_energies(engine: Engine, num_samples: int, seed: int) -> None:
    """Float32 arithmetic stays within 2e-3 of the equations in float64."""
    samples = speech_like(num_samples, seed)
    difference = np.abs(log_mel_energies(samples, engine) - reference(samples))
    assert difference.max() < 2e-3
    assert np.quantile(difference, 0.99) < 2e-4


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(0, 0), (399, 0), (400, 1), (559, 1), (560, 2), (16000, 98)]
)
def test_only_whole_windows_count(num_samples: int, expected: int) -> None:
    """1 + (n - 400) // 160 frames, snipped at the edges."""
    assert num_frames(num_samples) == expected
    if expected:
        assert log_mel_energies(speech_like(num_samples, 0)).shape == (expected, NUM_BINS)


@pytest.mark.parametrize("engine", ENGINES)
def test_frames_come_from_their_own_window_only(engine: Engine) -> None:
    """A later start by one shift drops the first frame and nothing else."""
    samples = speech_like(4000, 4)
    later = log_mel_energies(samples[160:], engine)
    assert log_mel_energies(samples, engine)[1:].tobytes() == later.tobytes()


@settings(max_examples=20)
@given(st.integers(1, 3 * BLOCK_FRAMES), st.integers(0, 2 * BLOCK_FRAMES), st.integers(0, 3))
def test_a_frame_has_the_same_bits_wherever_it_stands(
    num_frames: int, first: int, num_floats_moved: int
) -> None:
    """Cut anywhere, at any address: nothing depends on a frame's block or on its neighbours."""
    stream = speech_like(160 * (5 * BLOCK_FRAMES) + 400, 5)
    part = stream[160 * first : 160 * (first + num_frames - 1) + 400]
    memory = np.zeros(len(part) + num_floats_moved, dtype=np.float32)
    moved = memory[num_floats_moved:]
    moved[:] = part
    expected = log_mel_energies(stream)[first : first + num_frames]
    assert log_mel_energies(moved).tobytes() == expected.tobytes()


def test_cpus_with_other_vector_instructions_give_the_same_bits() -> None:
    """Features committed on one machine can be checked on another one."""
    program = (
        "import sys, numpy; from pipeline.filterbank.log_mel import log_mel_energies as energies;"
        "samples = numpy.frombuffer(sys.stdin.buffer.read(), numpy.float32);"
        "sys.stdout.buffer.write(energies(samples).tobytes())"
    )
    samples = speech_like(40000, 6)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"NPY_DISABLE_CPU_FEATURES": "AVX512_SPR AVX512_ICL X86_V4"},
        input=samples.tobytes(),
        capture_output=True,
        check=True,
    )
    assert done.stdout == log_mel_energies(samples).tobytes()


def test_less_than_a_window_is_refused() -> None:
    """The error names the bound."""
    with pytest.raises(ValueError, match="399 samples: need 400"):
        log_mel_energies(np.zeros(399, dtype=np.float32))


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_are_floats_of_one_channel(engine: Engine) -> None:
    """In double precision they have the energies of the single ones."""
    samples = np.random.default_rng(0).normal(scale=0.1, size=800)
    found = log_mel_energies(samples, engine)
    np.testing.assert_array_equal(found, log_mel_energies(samples.astype(np.float32), engine))
    for other in (np.zeros(800, np.int16), np.zeros((800, 2), np.float32)):
        with pytest.raises(ValueError, match="need one axis of floats"):
            mono_samples(other)
