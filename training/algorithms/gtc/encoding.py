"""Define gradient threshold compression's messages, and encode and decode them on a CPU.

A message (003 VI-A, 000 2.1) is a vector of 32-bit words: its `Encoding`, the number of elements
that reached the threshold, and the body. For `INDICES` the body has one word for each sent element:
the sign bit and a 31-bit index. For `MAP` it is two planes of one bit for each element, lowest bit
first: sent or not, negative or not. `cuda_encoding` makes the same messages on a GPU.

NumPy works on the tensors' own memory, in tiles that fit into the cache. One pass adds the gradient
and marks the elements below the threshold; later passes read only the others. Where installation
found a C compiler, `threshold_encoding.c` makes the same float32 messages at the memory's speed:
messages, residuals and counts are equal bit for bit.
"""

import ctypes
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int32, Int64, UInt8, UInt64
from torch import Tensor

from pipeline.compiled_library import compiled_library

MAX_ELEMENTS = 2**31 - 1
SIGN_BIT = -(2**31)
INDEX_BITS = 2**31 - 1
WORD_BITS = 32
HEADER_WORDS = 2
TILE_WORDS = 2**11


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
    encoding, body = int(message[0]), message[HEADER_WORDS:].numpy()
    if encoding == Encoding.MAP:
        _add_map(counts.numpy(), *body.reshape(2, -1))
    elif encoding == Encoding.INDICES:
        # An index occurs once in a message, so plain indexing adds.
        counts.numpy()[body & INDEX_BITS] += np.where(body < 0, np.int32(-1), np.int32(1))


def _add_map(
    counts: Int32[np.ndarray, " elements"],
    sent: Int32[np.ndarray, " plane"],
    negative: Int32[np.ndarray, " plane"],
) -> None:
    for first in range(0, len(sent), TILE_WORDS):  # tiles fit into the cache
        tile = counts[first * WORD_BITS : (first + TILE_WORDS) * WORD_BITS]
        sent_bits, negative_bits = (
            np.unpackbits(
                plane[first : first + TILE_WORDS].view(np.uint8),
                count=len(tile),
                bitorder="little",
            ).view(np.int8)
            for plane in (sent, negative)
        )
        tile += sent_bits - 2 * negative_bits


TILE_ELEMENTS = 2**16
GROUP_BITS = 64
GROUPS_AT_ONCE = 2**12
ALL_BELOW = np.uint64(2**GROUP_BITS - 1)


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
    # Accumulate, and compare with the threshold.
    below = _accumulate(r, gradients.numpy(), tau)
    num_sent = GROUP_BITS * len(below) - int(np.bitwise_count(below).sum(dtype=np.int64))
    # Choose the shorter encoding, quantize to one bit, and subtract the sent part.
    is_map = num_sent > num_map_words(len(r))
    body = np.zeros(num_map_words(len(r)) if is_map else num_sent, np.int32)
    take = _take_map if is_map else _take_indices
    if not take(r, below, tau, body):
        return torch.tensor([Encoding.NOT_FINITE, num_sent], dtype=torch.int32)
    header = np.array([Encoding.MAP if is_map else Encoding.INDICES, num_sent], np.int32)
    return torch.from_numpy(np.concatenate([header, body]))


def _accumulate(
    r: Float[np.ndarray, " elements"], gradients: Float[np.ndarray, " elements"], tau: np.floating
) -> UInt64[np.ndarray, " groups"]:
    """Add the gradients; return one bit for each element, set where |r| < tau and in padding."""
    tile_bytes = TILE_ELEMENTS // 8
    bits = np.empty(-(-len(r) // TILE_ELEMENTS) * tile_bytes, np.uint8)
    below, above = np.empty((2, TILE_ELEMENTS), bool)
    for number, first in enumerate(range(0, len(r), TILE_ELEMENTS)):
        tile = r[first : first + TILE_ELEMENTS]
        np.add(tile, gradients[first : first + TILE_ELEMENTS], out=tile)
        # Two comparisons are faster than |r| and one, and a NaN passes neither.
        np.less(tile, tau, out=below[: len(tile)])
        np.greater(tile, -tau, out=above[: len(tile)])
        np.logical_and(below, above, out=below)
        below[len(tile) :] = True
        packed = np.packbits(below, bitorder="little")
        bits[number * tile_bytes : (number + 1) * tile_bytes] = packed
    return bits.view(np.uint64)


def _take_indices(
    r: Float[np.ndarray, " elements"],
    below: UInt64[np.ndarray, " groups"],
    tau: np.floating,
    words: Int32[np.ndarray, " sent"],
) -> bool:
    """Write one word for each element that reaches tau; return whether all of them are finite."""
    groups = np.flatnonzero(below != ALL_BELOW)
    are_finite, num_taken = True, 0
    for first in range(0, len(groups), GROUPS_AT_ONCE):
        indices = _indices(below, groups[first : first + GROUPS_AT_ONCE])
        values = r.take(indices)
        are_finite &= bool(np.isfinite(values).all())
        r[indices] = values - np.copysign(tau, values)
        taken = words[num_taken : num_taken + len(indices)]
        # The sign bit is multiplied in: a ufunc's `where` takes 4.6 ns an element, this 0.4.
        np.bitwise_or(indices, np.signbit(values) * SIGN_BIT, out=taken, casting="unsafe")
        num_taken += len(indices)
    return are_finite


def _indices(
    below: UInt64[np.ndarray, " groups"], groups: Int64[np.ndarray, " found"]
) -> Int64[np.ndarray, " sent"]:
    """Return the sorted indices of the elements in `groups` that reach the threshold.

    It searches bytes first: flatnonzero takes 28 ns a hit if under a tenth of its input is true.
    """
    reached = np.invert(below[groups]).view(np.uint8)
    octets = np.flatnonzero(reached != 0)
    bits = np.flatnonzero(np.unpackbits(reached[octets], bitorder="little").view(bool))
    of_bits = octets[bits >> 3]
    indices: Int64[np.ndarray, " sent"] = groups[of_bits >> 3] << 6 | (of_bits & 7) << 3 | bits & 7
    return indices


def _take_map(
    r: Float[np.ndarray, " elements"],
    below: UInt64[np.ndarray, " groups"],
    tau: np.floating,
    body: Int32[np.ndarray, " map"],
) -> bool:
    """Write both planes of all elements; return whether all are finite."""
    planes = body.view(np.uint8).reshape(2, 4 * num_plane_words(len(r)))
    are_finite = True
    for first in range(0, len(r), TILE_ELEMENTS):
        tile = r[first : first + TILE_ELEMENTS]
        octets = slice(first // 8, (first + len(tile) + 7) // 8)
        sent = _unpacked(~below.view(np.uint8)[octets], len(tile))
        are_finite &= bool(np.isfinite(tile).all())
        planes[0, octets] = np.packbits(sent, bitorder="little")
        planes[1, octets] = np.packbits(np.signbit(tile) & sent, bitorder="little")
        # A sent element has |r| >= tau, so clipping it gives sign(r) tau.
        tile -= np.clip(tile, -tau, tau) * sent
    return are_finite


def _unpacked(
    octets: UInt8[np.ndarray, " bytes"], num_elements: int
) -> Bool[np.ndarray, " elements"]:
    return np.unpackbits(octets, count=num_elements, bitorder="little").view(bool)


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
