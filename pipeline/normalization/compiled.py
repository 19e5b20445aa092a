"""Call `frame_sums.c`, which has the bits of NumPy's functions at several times their speed."""

import ctypes
from collections.abc import Callable

import numpy as np
from jaxtyping import Float16, Float32, Float64

from pipeline.compiled_library import compiled_library

_pointer, _number = ctypes.c_void_p, ctypes.c_int64


def subtract_causal_means(
    total: Float64[np.ndarray, " 64"],
    count: int,
    energies: Float32[np.ndarray, "frames 64"],
    dtype: type[np.floating],
) -> np.ndarray:
    """Subtract causal means; `total`, the sum of `count` frames before, becomes that of all."""
    left = np.empty(energies.shape, dtype)
    function = "subtract_causal_means" + ("_to_half" if dtype == np.float16 else "")
    frames = np.ascontiguousarray(energies)
    _function(function)(_address(total), count, _address(frames), len(frames), _address(left))
    return left


def add_moments(
    frames: Float16[np.ndarray, "frames 64"],
    sums: Float64[np.ndarray, " 64"],
    squares: Float64[np.ndarray, " 64"],
) -> None:
    """Add finite frames to `sums`, and their squares to `squares`."""
    rows = np.ascontiguousarray(frames)
    _function("add_moments")(_address(rows), len(rows), _address(sums), _address(squares))


def is_compiled() -> bool:
    """Return whether installation found a C compiler."""
    return _C is not None


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def _function(name: str) -> Callable[..., None]:
    function: Callable[..., None] = getattr(_C, name)
    return function


def typed(library: ctypes.CDLL | None) -> ctypes.CDLL | None:
    """Declare the functions of a build of the C file."""
    if library is None:
        return None
    for name in ("subtract_causal_means", "subtract_causal_means_to_half"):
        getattr(library, name).argtypes = _pointer, _number, _pointer, _number, _pointer
        getattr(library, name).restype = None
    library.add_moments.argtypes = _pointer, _number, _pointer, _pointer
    library.add_moments.restype = None
    return library


_C = typed(compiled_library("pipeline.normalization._frame_sums"))
