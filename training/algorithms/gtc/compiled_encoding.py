"""Gradient threshold compression of float32 on a CPU by `threshold_encoding.c`: memory's speed.

Installation compiles it where there is a C compiler. The messages, what stays and what is added are
those of `encoding` and `gradient_threshold` to the bit; those are the ones to read.
"""

import ctypes
import sysconfig
from pathlib import Path

import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from training.algorithms.gtc.gradient_threshold import (
    HEADER_WORDS,
    Encoding,
    num_map_words,
    num_plane_words,
)

_GROUP_WORDS = 64  # what the loop may write beyond a map's length before it looks


def take_message(
    residual: Float32[Tensor, " elements"],
    gradients: Float32[Tensor, " elements"],
    gradient_threshold: float,
) -> Int32[Tensor, " words"]:
    """Add a step's gradients to `residual`; move +-gradient_threshold out of what then reaches it.

    As `encoding.take_message`; the message is the beginning of a larger buffer.
    """
    size = len(residual)
    message = torch.empty(HEADER_WORDS + num_map_words(size) + _GROUP_WORDS, dtype=torch.int32)
    r, g, to = _address(residual), _address(gradients), _address(message)
    num_words = _loaded().take_message(r, g, size, gradient_threshold, to)
    if num_words < 0:
        raise MemoryError(f"no {4 * num_map_words(size)} bytes for a map of {size} elements")
    return message[:num_words]


def add_message(counts: Int32[Tensor, " elements"], message: Int32[Tensor, " words"]) -> None:
    """Add a message's signs to `counts`; ValueError for an index that is not within them."""
    encoding, size, body = int(message[0]), len(counts), message[HEADER_WORDS:]
    to, words = _address(counts), _address(body)
    if encoding == Encoding.MAP:
        _require(len(body) == num_map_words(size), f"a map of {len(body)} words", size)
        _loaded().add_map(to, size, words, words + 4 * num_plane_words(size))
    elif encoding == Encoding.INDICES:
        num_added = _loaded().add_indices(to, size, words, len(body))
        _require(num_added == len(body), f"word {num_added} of the message", size)


def is_compiled() -> bool:
    """Whether installation found a C compiler."""
    return _C is not None


def _require(fits: bool, what: str, size: int) -> None:
    if not fits:
        raise ValueError(f"{what}: not of a model of {size} parameters: start ranks of one model")


def _address(vector: Tensor) -> int:
    assert vector.is_contiguous()
    assert vector.device.type == "cpu"
    return vector.data_ptr()


def _load() -> ctypes.CDLL | None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = Path(__file__).with_name(f"_threshold_encoding{suffix}")
    if not path.exists():
        return None
    library, pointer, number = ctypes.CDLL(str(path)), ctypes.c_void_p, ctypes.c_int64
    library.take_message.argtypes = pointer, pointer, number, ctypes.c_float, pointer
    library.add_indices.argtypes = pointer, number, pointer, number
    library.add_map.argtypes = pointer, number, pointer, pointer
    library.take_message.restype = library.add_indices.restype = number
    library.add_map.restype = None
    return library


def _loaded() -> ctypes.CDLL:
    assert _C is not None
    return _C


_C = _load()
