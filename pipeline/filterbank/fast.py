"""Kaldi's log-mel energies in NumPy and SciPy, some seven times as fast as the reference.

A frame's energies depend on its own 400 samples alone, to the bit: neither on its neighbours nor
on where a block of frames begins. That, and equal bits on CPUs with other vector instructions, is
why the mel filters are a sparse product and no BLAS call, whose sums depend on a row's position.
"""

import numpy as np
import scipy.fft
import scipy.sparse
from jaxtyping import Float32, Float64

from pipeline.filterbank import NUM_BINS, SAMPLE_RATE_HZ, SHIFT_SAMPLES, WINDOW_SAMPLES

FFT_SAMPLES = 512
LOW_HZ, HIGH_HZ = 20.0, 8000.0
PRE_EMPHASIS = 0.97
# Frames and spectra stay in the L2 cache, and in memory that malloc keeps: with 200 frames it
# returns their pages to the system after every call, which costs a quarter.
BLOCK_FRAMES = 100
_DC_GAIN = np.float32(1 - PRE_EMPHASIS)
_PART_SAMPLES = 80  # shifts and windows are whole multiples: sums of parts give all means
_LOWEST_ENERGY = np.finfo(np.float32).eps
_FULL_SCALE = 32768  # Kaldi's samples are 16-bit integers


def fast_log_mel_energies(
    samples: Float32[np.ndarray, " samples"],
) -> Float32[np.ndarray, "frames 64"]:
    """Compute the energies of at least one window of 16 kHz samples in [-1, 1]."""
    num_frames = 1 + (len(samples) - WINDOW_SAMPLES) // SHIFT_SAMPLES
    energies = np.empty((num_frames, NUM_BINS), np.float32)
    padded = np.zeros((min(num_frames, BLOCK_FRAMES), FFT_SAMPLES), np.float32)
    for first in range(0, num_frames, BLOCK_FRAMES):
        block = energies[first : first + BLOCK_FRAMES]
        start = first * SHIFT_SAMPLES
        end = start + (len(block) - 1) * SHIFT_SAMPLES + WINDOW_SAMPLES
        frames = padded[: len(block)]
        _window(samples[start:end], frames[:, :WINDOW_SAMPLES])
        block[:] = (_MEL_WEIGHTS @ _power(frames)).T
        np.maximum(block, _LOWEST_ENERGY, out=block)
        np.log(block, out=block)
    return energies


def _window(
    samples: Float32[np.ndarray, " samples"], frames: Float32[np.ndarray, "frames window"]
) -> None:
    """Fill `frames`: DC removed, pre-emphasized, windowed.

    The window starts with 0, so a frame's first sample needs no value before it, and pre-emphasis
    can go over the stream; of a frame's mean it leaves the 0.03rd part, which is subtracted.
    """
    # x - 0.97 y as (x - y) + 0.03 y: a constant offset then costs none of float32's digits.
    emphasized = np.zeros_like(samples)
    np.multiply(samples[:-1], _DC_GAIN, out=emphasized[1:])
    emphasized[1:] += samples[1:] - samples[:-1]
    parts = np.einsum("ps->p", samples.reshape(-1, _PART_SAMPLES))
    num_parts = WINDOW_SAMPLES // _PART_SAMPLES
    sums = sum(parts[part : len(parts) - num_parts + 1 + part : 2] for part in range(num_parts))
    offsets = sums * (_DC_GAIN / np.float32(WINDOW_SAMPLES))
    # 1 us; np.lib.stride_tricks takes 50, as long as a second of speech.
    step = emphasized.itemsize
    windows: np.ndarray = np.ndarray(
        frames.shape, np.float32, buffer=emphasized, strides=(SHIFT_SAMPLES * step, step)
    )
    centred = windows - offsets[:, np.newaxis]
    # 106 ns a frame; np.multiply takes 155.
    np.einsum("fs,s->fs", centred, _WINDOW, out=frames)


def _power(
    frames: Float32[np.ndarray, "frames fft_samples"],
) -> Float32[np.ndarray, "fft_bins frames"]:
    """The power spectra, frames side by side as the sparse product needs them."""
    parts = scipy.fft.rfft(frames, axis=1).view(np.float32)
    np.multiply(parts, parts, out=parts)
    real, imaginary = parts[:, 0::2].T, parts[:, 1::2].T
    power: np.ndarray = np.add(real, imaginary, order="C")
    return power


def _povey_window() -> Float32[np.ndarray, " window"]:
    phases = 2 * np.pi * np.arange(WINDOW_SAMPLES) / (WINDOW_SAMPLES - 1)
    return (_FULL_SCALE * (0.5 - 0.5 * np.cos(phases)) ** 0.85).astype(np.float32)


def mel(frequency_hz: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Convert frequencies to Kaldi's mel scale."""
    return 1127 * np.log(1 + frequency_hz / 700)


def _mel_weights() -> scipy.sparse.csr_array:
    """Triangles of equal width in mel: [64, 257], two entries or fewer for each FFT bin."""
    low, high = mel(np.array([LOW_HZ, HIGH_HZ]))
    edges = np.linspace(low, high, NUM_BINS + 2)[:, np.newaxis]
    bins = mel(np.arange(FFT_SAMPLES // 2 + 1) * SAMPLE_RATE_HZ / FFT_SAMPLES)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    weights = np.maximum(0, np.minimum(rising, falling))
    weights[:, -1] = 0  # as Kaldi, which leaves out the Nyquist frequency
    return scipy.sparse.csr_array(weights.astype(np.float32))


_WINDOW = _povey_window()
_MEL_WEIGHTS = _mel_weights()
