"""Define gradient threshold compression's messages, and encode and decode them on a CPU.

A message (003 VI-A, 000 2.1) is a vector of 32-bit words: its `Encoding`, the number of elements
that reached the threshold, and the body. For `INDICES` the body has one word for each sent element:
the sign bit and a 31-bit index. For `MAP` it is two planes of one bit for each element, lowest bit
first: sent or not, negative or not. `cuda_encoding` makes the same messages on a GPU.

NumPy makes messages by a few operations on whole vectors. Where installation found a C compiler,
`threshold_encoding.c` makes the same float32 messages at the memory's speed: messages, residuals
and counts are equal bit for bit.
"""

import ctypes
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from pipeline.compiled_library import compiled_library

MAX_ELEMENTS = 2**31 - 1
SIGN_BIT = -(2**31)
INDEX_BITS = 2**31 - 1
WORD_BITS = 32
HEADER_WORDS = 2


class Encoding(IntEnum):
    """Encoding is the first word of a message."""

    INDICES = 0
    MAP = 1
    NOT_FINITE = 2  # the sender's gradient holds a NaN or an infinity, so that all ranks stop


def num_plane_words(num_elements: int) -> int:
    """Return the number of words of a plane, which has one bit for every element."""
    return -(-num_elements // WORD_BITS)


def num_map_words(num_elements: int) -> int:
    """Return the number of words of a map's two planes.

    No body of indices is longer: above a density of 1/16 the message is a map.
    """
    return 2 * num_plane_words(num_elements)


def add_message(counts: Int32[Tensor, " elements"], message: Int32[Tensor, " words"]) -> None:
    """Add a message's signs to `counts`; integer sums do not depend on the ranks' order."""
    encoding, body, sums = int(message[0]), message[HEADER_WORDS:].numpy(), counts.numpy()
    if encoding == Encoding.MAP:
        planes = body.reshape(2, -1).view(np.uint8)
        bits = np.unpackbits(planes, axis=1, count=len(sums), bitorder="little")
        sent, negative = bits.view(np.int8)
        sums += sent - 2 * negative
    elif encoding == Encoding.INDICES:
        # An index occurs once in a message, so plain indexing adds.
        sums[body & INDEX_BITS] += np.where(body < 0, np.int32(-1), np.int32(1))


def take_message(
    residual: Float[Tensor, " elements"],
    gradients: Float[Tensor, " elements"],
    gradient_threshold: float,
) -> Int32[Tensor, " words"]:
    """Add a step's gradients r += g; move sign(r) tau into a message wherever then |r| >= tau.

    An element moves at most once a step, however large it is. If the message says that the gradient
    is not finite, neither is the residual: resume from a checkpoint.
    """
    r = residual.numpy()
    tau = r.dtype.type(gradient_threshold)
    r += gradients.numpy()
    indices = np.flatnonzero(~(np.abs(r) < tau))  # a NaN is not below the threshold
    values = r[indices]
    r[indices] = values - np.copysign(tau, values)
    is_negative = np.signbit(values)
    is_map = len(indices) > num_map_words(len(r))
    encoding = Encoding.MAP if is_map else Encoding.INDICES
    if not np.isfinite(values).all():
        encoding, body = Encoding.NOT_FINITE, np.zeros(0, np.int32)
    elif is_map:
        planes = np.zeros((2, WORD_BITS * num_plane_words(len(r))), bool)
        planes[0, indices] = True
        planes[1, indices] = is_negative
        body = np.packbits(planes, axis=1, bitorder="little").view(np.int32).ravel()
    else:
        body = (indices | np.where(is_negative, SIGN_BIT, 0)).astype(np.int32)
    header = np.array([encoding, len(indices)], np.int32)
    return torch.from_numpy(np.concatenate([header, body]))


_GROUP_WORDS = 64  # the loop checks its room once a group, so it may write this many words more

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_C = compiled_library(
    "training.algorithms.gtc._threshold_encoding",
    {
        "take_message": (_number, _pointer, _pointer, _number, ctypes.c_float, _pointer),
        "add_indices": (_number, _pointer, _number, _pointer, _number),
        "add_map": (None, _pointer, _number, _pointer, _pointer),
    },
)


def is_compiled() -> bool:
    """Return whether installation found a C compiler."""
    return _C is not None


def compiled_take_message(
    residual: Float32[Tensor, " elements"],
    gradients: Float32[Tensor, " elements"],
    gradient_threshold: float,
) -> Int32[Tensor, " words"]:
    """Do what `take_message` does in C; the message is the beginning of a larger buffer."""
    assert _C is not None
    size = len(residual)
    # No body is longer than a map's two planes, so the C loop never grows its buffer.
    message = torch.empty(HEADER_WORDS + num_map_words(size) + _GROUP_WORDS, dtype=torch.int32)
    r, g, target = _address(residual), _address(gradients), _address(message)
    num_words = _C.take_message(r, g, size, gradient_threshold, target)
    if num_words < 0:
        raise MemoryError(f"cannot allocate {4 * num_map_words(size)} bytes for {size} elements")
    return message[:num_words]


def compiled_add_message(
    counts: Int32[Tensor, " elements"], message: Int32[Tensor, " words"]
) -> None:
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
