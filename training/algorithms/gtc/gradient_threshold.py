"""Define and decode the messages of gradient threshold compression (paper 003 VI-A, 000 2.1).

A message is a vector of 32-bit words: its `Encoding`, the number of elements that reached the
threshold, and the body. For `INDICES` the body has one word for each sent element: the sign bit and
a 31-bit index. For `MAP` it is two planes of one bit for each element, lowest bit first: sent or
not, negative or not. `encoding` makes messages on a CPU in NumPy, `compiled_encoding` in C, and
`cuda_encoding` on a GPU.
"""

import math
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

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


def check_gradient_threshold(gradient_threshold: float, residual: Tensor) -> None:
    """Raise ValueError for a threshold, a type or a model size that no message can carry."""
    if not 0 <= gradient_threshold < math.inf:
        raise ValueError(
            f"gradient_threshold = {gradient_threshold}: need a finite number >= 0; 0 sends "
            "unquantized gradients"
        )
    if gradient_threshold == 0:
        return
    if residual.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a residual of {residual.dtype}: need float32 or float64, or it loses small gradients"
        )
    if not 0 < float(torch.tensor(gradient_threshold, dtype=residual.dtype)) < math.inf:
        raise ValueError(f"gradient_threshold = {gradient_threshold}: not within {residual.dtype}")
    if len(residual) > MAX_ELEMENTS:
        raise ValueError(
            f"{len(residual)} parameters: need at most {MAX_ELEMENTS}, a message's 31-bit index"
        )


def num_plane_words(num_elements: int) -> int:
    """Return the number of words of a plane, which has one bit for every element."""
    return -(-num_elements // WORD_BITS)


def num_map_words(num_elements: int) -> int:
    """Return the number of words of a map's two planes.

    No body of indices is longer: above a density of 1/16 the message is a map.
    """
    return 2 * num_plane_words(num_elements)


def is_finite(message: Int32[Tensor, " words"]) -> bool:
    """Return whether the sender's gradient was finite."""
    return int(message[0]) != Encoding.NOT_FINITE


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
