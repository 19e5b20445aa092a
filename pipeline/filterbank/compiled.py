"""Call `filter_bank.c`, which has the bits of `fast` at several times its speed.

Installation compiles the C file if there is a C compiler.
"""

import ctypes

import numpy as np
from jaxtyping import Float32

from pipeline.compiled_library import compiled_library
from pipeline.filterbank import NUM_BINS, SHIFT_SAMPLES, WINDOW_SAMPLES, fast

_float, _pointer = ctypes.c_float, ctypes.c_void_p


class _Tables(ctypes.Structure):
    """_Tables are the C struct of this name."""

    _fields_ = (
        *((name, _pointer) for name in ("window", "cosines", "sines")),
        *((name, _pointer) for name in ("mel_starts", "mel_columns", "mel_weights")),
        ("log_coefficients", _pointer),
        *((name, _float) for name in ("dc_gain", "offset_gain", "lowest_energy", "sqrt_half")),
        *((name, _float) for name in ("log_2_high", "log_2_low")),
    )


def compiled_log_mel_energies(
    samples: Float32[np.ndarray, " samples"],
) -> Float32[np.ndarray, "frames 64"]:
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


def typed(library: ctypes.CDLL | None) -> ctypes.CDLL | None:
    """Declare the functions of a build of the C file."""
    if library is not None:
        library.log_mel_energies.argtypes = _pointer, _pointer, ctypes.c_int64, _pointer
        library.log_mel_energies.restype = None
    return library


_ARRAYS = (
    *(fast.WINDOW, fast.COSINES, fast.SINES),
    fast.MEL_WEIGHTS.indptr.astype(np.int32),
    fast.MEL_WEIGHTS.indices.astype(np.int32),
    *(fast.MEL_WEIGHTS.data, fast.LOG_COEFFICIENTS),
)
_TABLES = _Tables(
    *(array.ctypes.data for array in _ARRAYS),
    *(fast.DC_GAIN, fast.OFFSET_GAIN, fast.LOWEST_ENERGY, fast.SQRT_HALF),
    *(fast.LOG_2_HIGH, fast.LOG_2_LOW),
)
_C = typed(compiled_library("pipeline.filterbank._filter_bank"))
