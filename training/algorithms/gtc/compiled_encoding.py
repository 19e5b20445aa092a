"""Encode and decode float32 messages on a CPU by `threshold_encoding.c`, at the memory's speed.

Installation compiles the C file if there is a C compiler. Messages, residuals and counts equal
those of `encoding` bit for bit; read the algorithm there.
"""

import ctypes

import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from pipeline.compiled_library import compiled_library
from training.algorithms.gtc.encoding import HEADER_WORDS, Encoding, num_map_words, num_plane_words

_GROUP_WORDS = 64  # the loop checks its room once a group, so it may write this many words more

_C = compiled_library("training.algorithms.gtc._threshold_encoding")
if _C is not None:
    _POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
    _C.take_message.argtypes = _POINTER, _POINTER, _NUMBER, ctypes.c_float, _POINTER
    _C.add_indices.argtypes = _POINTER, _NUMBER, _POINTER, _NUMBER
    _C.add_map.argtypes = _POINTER, _NUMBER, _POINTER, _POINTER
    _C.take_message.restype = _C.add_indices.restype = _NUMBER
    _C.add_map.restype = None


def is_compiled() -> bool:
    """Return whether installation found a C compiler."""
    return _C is not None


def take_message(
    residual: Float32[Tensor, " elements"],
    gradients: Float32[Tensor, " elements"],
    gradient_threshold: float,
) -> Int32[Tensor, " words"]:
    """Do what `encoding.take_message` does; the message is the beginning of a larger buffer."""
    assert _C is not None
    size = len(residual)
    # No body is longer than a map's two planes, so the C loop never grows its buffer.
    message = torch.empty(HEADER_WORDS + num_map_words(size) + _GROUP_WORDS, dtype=torch.int32)
    r, g, target = _address(residual), _address(gradients), _address(message)
    num_words = _C.take_message(r, g, size, gradient_threshold, target)
    if num_words < 0:
        raise MemoryError(f"cannot allocate {4 * num_map_words(size)} bytes for {size} elements")
    return message[:num_words]


def add_message(counts: Int32[Tensor, " elements"], message: Int32[Tensor, " words"]) -> None:
    """Add a message's signs to `counts`; raise ValueError for an index beyond them."""
    assert _C is not None
    encoding, size, body = int(message[0]), len(counts), message[HEADER_WORDS:]
    target, words = _address(counts), _address(body)
    if encoding == Encoding.MAP:
        _require(len(body) == num_map_words(size), f"a map of {len(body)} words", size)
        _C.add_map(target, size, words, words + 4 * num_plane_words(size))
    elif encoding == Encoding.INDICES:
        # The C loop stops at an index beyond the model, which another rank's message may hold.
        num_added = _C.add_indices(target, size, words, len(body))
        _require(num_added == len(body), f"word {num_added} of the message", size)


def _require(fits: bool, what: str, size: int) -> None:
    if not fits:
        raise ValueError(
            f"{what} does not fit a model of {size} parameters: start all ranks with one model"
        )


def _address(vector: Tensor) -> int:
    assert vector.is_contiguous()
    assert vector.device.type == "cpu"
    return vector.data_ptr()
