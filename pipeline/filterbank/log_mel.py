"""Compute log-mel energies, 25 ms window, 10 ms shift (paper 003 II-B), by two engines.

`fast` is our own engine. It exists in NumPy and, with the same bits, in `filter_bank.c`, which is
several times as fast; installation compiles it where there is a C compiler. `kaldi` is the
reference: kaldi-native-fbank, the code of the Kaldi family.

A frame's energies depend on its own 400 samples alone, to the bit: neither on its neighbours nor
on where a block of frames begins. Every sum has a fixed order, and products and sums are rounded
one by one, so that the loop in C has the same bits on any CPU. Frames lie side by side: an array's
last axis is the frame.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse
from jaxtyping import Float, Float32, Float64

from pipeline.compiled_library import compiled_library
from pipeline.filterbank import (
    FRAME_SHIFT_MS,
    NUM_BINS,
    SAMPLE_RATE_HZ,
    SHIFT_SAMPLES,
    WINDOW_MS,
    WINDOW_SAMPLES,
    Engine,
)

FFT_SAMPLES = 512
NUM_POINTS = FFT_SAMPLES // 2
"""A real transform of 512 samples is a complex one of 256 points, even samples beside odd ones."""
LOW_HZ, HIGH_HZ = 20.0, 8000.0
PRE_EMPHASIS = 0.97
# Frames and spectra stay in the L2 cache, and in memory that malloc keeps: with 200 frames it
# returns their pages to the system after every call, which costs a quarter.
BLOCK_FRAMES = 100
DC_GAIN = np.float32(1 - PRE_EMPHASIS)
OFFSET_GAIN = np.float32(DC_GAIN / np.float32(WINDOW_SAMPLES))
PART_SAMPLES = 80  # shifts and windows are whole multiples: sums of parts give all means
_NUM_LANES = 8  # of a part's sum
_FULL_SCALE = 32768  # Kaldi's samples are 16-bit integers

Rows = Float32[np.ndarray, "rows frames"]
Points = tuple[Rows, Rows]
"""Real and imaginary parts."""


def fast_log_mel_energies(
    samples: Float32[np.ndarray, " samples"],
) -> Float32[np.ndarray, "frames bins"]:
    """Compute the energies of at least one window of 16 kHz samples in [-1, 1]."""
    num_frames = 1 + (len(samples) - WINDOW_SAMPLES) // SHIFT_SAMPLES
    energies = np.empty((num_frames, NUM_BINS), np.float32)
    for first in range(0, num_frames, BLOCK_FRAMES):
        block = energies[first : first + BLOCK_FRAMES]
        start = first * SHIFT_SAMPLES
        end = start + (len(block) - 1) * SHIFT_SAMPLES + WINDOW_SAMPLES
        mel_energies: Rows = MEL_WEIGHTS @ _power(_transform(_windows(samples[start:end])))
        block[:] = natural_log(np.maximum(mel_energies, LOWEST_ENERGY)).T
    return energies


def _windows(samples: Float32[np.ndarray, " samples"]) -> Points:
    """Return even and odd samples of frames: DC removed, pre-emphasized, windowed, then zeros.

    The window starts with 0, so a frame's first sample needs no value before it, and pre-emphasis
    can go over the stream; of a frame's mean it leaves the 0.03rd part, which is subtracted.
    """
    # x - 0.97 y as (x - y) + 0.03 y: a constant offset then costs none of float32's digits.
    emphasized = np.zeros_like(samples)
    emphasized[1:] = DC_GAIN * samples[:-1] + (samples[1:] - samples[:-1])
    offsets = OFFSET_GAIN * _window_sums(samples)
    windows = np.lib.stride_tricks.sliding_window_view(emphasized, WINDOW_SAMPLES)
    frames = np.zeros((FFT_SAMPLES, len(offsets)), np.float32)
    frames[:WINDOW_SAMPLES] = (windows[::SHIFT_SAMPLES].T - offsets) * WINDOW[:, np.newaxis]
    return frames[0::2], frames[1::2]


def _window_sums(samples: Float32[np.ndarray, " samples"]) -> Float32[np.ndarray, " frames"]:
    octets = samples.reshape(-1, PART_SAMPLES // _NUM_LANES, _NUM_LANES)
    lanes = octets[:, 0]
    for number in range(1, octets.shape[1]):
        lanes = lanes + octets[:, number]
    while lanes.shape[1] > 1:  # each lane and the one half of the width away
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    parts, num_parts = lanes[:, 0], WINDOW_SAMPLES // PART_SAMPLES
    step = SHIFT_SAMPLES // PART_SAMPLES
    sums = parts[: len(parts) - num_parts + 1 : step]
    for part in range(1, num_parts):
        sums = sums + parts[part : len(parts) - num_parts + 1 + part : step]
    return sums


def _transform(points: Points) -> Points:
    """Transform 256 points by four passes of radix 4, which leave them in order (Stockham)."""
    stride = 1
    while stride < NUM_POINTS:
        points = _radix_4_pass(points, stride)
        stride *= 4
    return points


def _radix_4_pass(points: Points, stride: int) -> Points:
    """Combine points a quarter of the whole apart; groups of `stride` are transformed already."""
    quarter = NUM_POINTS // (4 * stride)
    (ar, br, cr, dr), (ai, bi, ci, di) = (
        part.reshape(4, quarter, stride, part.shape[1]) for part in points
    )
    real, imaginary = (np.empty((quarter, 4, *ar.shape[1:]), np.float32) for _ in range(2))
    real[:, 0], imaginary[:, 0] = (ar + cr) + (br + dr), (ai + ci) + (bi + di)
    turned = (
        ((ar - cr) + (bi - di), (ai - ci) - (br - dr)),
        ((ar + cr) - (br + dr), (ai + ci) - (bi + di)),
        ((ar - cr) - (bi - di), (ai - ci) + (br - dr)),
    )
    for k, (zr, zi) in enumerate(turned, 1):
        # exp(-2 pi i k p / n) for a pass of n points; in the last one all are 1.
        angles = slice(0, 2 * stride * k * (quarter - 1) + 1, 2 * stride * k)
        wr, wi = (table[angles].reshape(-1, 1, 1) for table in (COSINES, SINES))
        is_last = quarter == 1
        real[:, k] = zr if is_last else wr * zr - wi * zi
        imaginary[:, k] = zi if is_last else wr * zi + wi * zr
    num_frames = real.shape[-1]
    return real.reshape(NUM_POINTS, num_frames), imaginary.reshape(NUM_POINTS, num_frames)


def _power(points: Points) -> Rows:
    """Return four times the power of 256 FFT bins: of the real transform, by both its halves.

    With Z of the 256 points, E_k = Z_k + Z*_{256-k} and O_k = Z_k - Z*_{256-k}, twice a bin is
    E_k - i exp(-2 pi i k / 512) O_k, and that of 256 - k has the opposite terms.
    """
    (zr, zi), half = points, NUM_POINTS // 2
    front, back = slice(1, half + 1), slice(NUM_POINTS - 1, half - 1, -1)
    er, ei = zr[front] + zr[back], zi[front] - zi[back]
    dr, di = zr[front] - zr[back], zi[front] + zi[back]
    wr, wi = COSINES[front, np.newaxis], SINES[front, np.newaxis]
    tr, ti = wr * dr - wi * di, wr * di + wi * dr
    power = np.zeros_like(zr)
    power[back] = (er - ti) * (er - ti) + (ei + tr) * (ei + tr)
    power[front] = (er + ti) * (er + ti) + (ei - tr) * (ei - tr)
    return power


def natural_log(values: Rows) -> Rows:
    """Return natural logarithms of normal numbers, by Cephes' polynomial for float32.

    The libraries' logarithms have other last bits on other CPUs; this one is 1e-7 from the truth.
    """
    bits = values.view(np.int32)
    exponents = ((bits >> 23) - 126).astype(np.float32)
    fractions = ((bits & 0x7FFFFF) | 0x3F000000).view(np.float32)  # in [0.5, 1)
    is_low = fractions < SQRT_HALF
    x = np.where(is_low, fractions + fractions, fractions) - np.float32(1)
    exponents -= is_low.astype(np.float32)
    square = x * x
    y = np.full_like(x, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        y = y * x + coefficient
    y = y * x * square
    y = y + LOG_2_LOW * exponents
    y = y - np.float32(0.5) * square
    return (x + y) + LOG_2_HIGH * exponents


def _povey_window() -> Float32[np.ndarray, " window"]:
    phases = 2 * np.pi * np.arange(WINDOW_SAMPLES) / (WINDOW_SAMPLES - 1)
    return (_FULL_SCALE * (0.5 - 0.5 * np.cos(phases)) ** 0.85).astype(np.float32)


def mel(frequency_hz: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Convert frequencies to Kaldi's mel scale."""
    return 1127 * np.log(1 + frequency_hz / 700)


def _mel_weights() -> scipy.sparse.csr_array:
    """Triangles of equal width in mel: [NUM_BINS, 256], two entries or fewer for each FFT bin.

    A quarter of Kaldi's weights, as `_power` is four times the power; its 257th bin has none.
    """
    low, high = mel(np.array([LOW_HZ, HIGH_HZ]))
    edges = np.linspace(low, high, NUM_BINS + 2)[:, np.newaxis]
    bins = mel(np.arange(NUM_POINTS) * SAMPLE_RATE_HZ / FFT_SAMPLES)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    weights = np.maximum(0, np.minimum(rising, falling))
    return scipy.sparse.csr_array(weights.astype(np.float32) / np.float32(4))


WINDOW = _povey_window()
MEL_WEIGHTS = _mel_weights()
_ANGLES = -2 * np.pi * np.arange(FFT_SAMPLES) / FFT_SAMPLES
COSINES, SINES = np.cos(_ANGLES).astype(np.float32), np.sin(_ANGLES).astype(np.float32)
LOWEST_ENERGY = np.finfo(np.float32).eps
SQRT_HALF = np.float32(0.707106781186547524)
LOG_COEFFICIENTS = np.array(
    [
        *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1),
        *(-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1),
        *(2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    ],
    np.float32,
)
LOG_2_HIGH, LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""Their sum is log 2; products of the first with exponents are exact."""


_float, _pointer = ctypes.c_float, ctypes.c_void_p


class _Tables(ctypes.Structure):
    """_Tables are the C struct of this name."""

    _fields_ = (
        *((name, _pointer) for name in ("window", "cosines", "sines")),
        *((name, _pointer) for name in ("mel_starts", "mel_columns", "mel_weights")),
        ("log_coefficients", _pointer),
        *((name, _float) for name in ("dc_gain", "offset_gain", "lowest_energy", "sqrt_half")),
        *((name, _float) for name in ("log_2_high", "log_2_low")),
        ("num_bins", ctypes.c_int32),
    )


def compiled_log_mel_energies(
    samples: Float32[np.ndarray, " samples"],
) -> Float32[np.ndarray, "frames bins"]:
    """Compute the energies of at least one window of 16 kHz samples in [-1, 1]."""
    assert _C is not None
    samples = np.ascontiguousarray(samples)
    num_frames = 1 + (len(samples) - WINDOW_SAMPLES) // SHIFT_SAMPLES
    energies = np.empty((num_frames, NUM_BINS), np.float32)
    _C.log_mel_energies(
        ctypes.byref(_TABLES), samples.ctypes.data, num_frames, energies.ctypes.data
    )
    return energies


def is_compiled() -> bool:
    """Return whether installation found a C compiler."""
    return _C is not None


_ARRAYS = (
    *(WINDOW, COSINES, SINES),
    MEL_WEIGHTS.indptr.astype(np.int32),
    MEL_WEIGHTS.indices.astype(np.int32),
    *(MEL_WEIGHTS.data, LOG_COEFFICIENTS),
)
_TABLES = _Tables(
    *(array.ctypes.data for array in _ARRAYS),
    *(DC_GAIN, OFFSET_GAIN, LOWEST_ENERGY, SQRT_HALF),
    *(LOG_2_HIGH, LOG_2_LOW),
    NUM_BINS,
)
FUNCTIONS = {"log_mel_energies": (None, _pointer, _pointer, ctypes.c_int64, _pointer)}
_C = compiled_library("pipeline.filterbank._filter_bank", FUNCTIONS)


def kaldi_log_mel_energies(
    samples: Float32[np.ndarray, " samples"],
) -> Float32[np.ndarray, "frames bins"]:
    """Compute the energies of at least one window of 16 kHz samples in [-1, 1]."""
    # Here, as a recipe that names the fast engine needs no Kaldi.
    from kaldi_native_fbank import OnlineFbank  # noqa: PLC0415

    filter_bank = OnlineFbank(_options())
    # A memoryview crosses into C++ 1.4 times as fast as the array itself, 1.15 as a list.
    filter_bank.accept_waveform(SAMPLE_RATE_HZ, (samples * np.float32(32768)).data)
    filter_bank.input_finished()
    frames = [filter_bank.get_frame(frame) for frame in range(filter_bank.num_frames_ready)]
    return np.concatenate(frames).reshape(-1, NUM_BINS)


@cache
def _options() -> Any:  # noqa: ANN401
    from kaldi_native_fbank import FbankOptions  # noqa: PLC0415

    options = FbankOptions()
    options.frame_opts.samp_freq = SAMPLE_RATE_HZ
    options.frame_opts.frame_length_ms = WINDOW_MS
    options.frame_opts.frame_shift_ms = FRAME_SHIFT_MS
    options.frame_opts.dither = 0.0
    options.frame_opts.preemph_coeff = PRE_EMPHASIS
    options.frame_opts.remove_dc_offset = True
    options.frame_opts.window_type = "povey"
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = NUM_BINS
    options.mel_opts.low_freq = LOW_HZ
    options.mel_opts.high_freq = HIGH_HZ
    return options


_ENGINES: dict[Engine, Callable[[np.ndarray], np.ndarray]] = {
    # The same bits; without a C compiler NumPy takes seven times as long.
    "fast": compiled_log_mel_energies if is_compiled() else fast_log_mel_energies,
    "kaldi": kaldi_log_mel_energies,
}


def mono_samples(samples: np.ndarray) -> Float32[np.ndarray, " samples"]:
    """Return floats in single precision; ValueError for integers, and for several channels."""
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise ValueError(
            f"samples of {samples.dtype}, shape {samples.shape}: need one axis of floats in [-1, 1]"
        )
    return np.ascontiguousarray(samples, np.float32)


def num_frames(num_samples: int) -> int:
    """Count the frames whose whole window lies within `num_samples`."""
    return max(0, 1 + (num_samples - WINDOW_SAMPLES) // SHIFT_SAMPLES)


def log_mel_energies(
    samples: Float[np.ndarray, " samples"], engine: Engine = "fast"
) -> Float32[np.ndarray, "frames bins"]:
    """Compute the natural log of NUM_BINS mel energies (20..8000 Hz) of 16 kHz samples in [-1, 1].

    ValueError below one window of 400 samples, and for what is no sound of one channel as floats.
    """
    samples = mono_samples(samples)
    if len(samples) < WINDOW_SAMPLES:
        raise ValueError(f"{len(samples)} samples: need {WINDOW_SAMPLES}, one 25 ms window")
    return _ENGINES[engine](samples)
