"""Encode and decode messages on a GPU, without making the host wait (paper 003 VI-A, 000 2.1).

A message with room for all elements that reach the threshold equals that of `encoding` bit for bit,
with unused space at its end. Triton comes only with torch's builds for CUDA: import this late.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from training.algorithms.gtc.gradient_threshold import (
    HEADER_WORDS,
    WORD_BITS,
    num_map_words,
    num_plane_words,
)
from training.algorithms.gtc.triton_kernels import accumulate, add_signs, choose, take

BLOCK_ROWS = 256
"""Rows that one Triton program handles; a row is 32 elements, one word of a plane."""

BLOCK_ELEMENTS = WORD_BITS * BLOCK_ROWS
COUNTS_AT_ONCE = 4096


def take_message(
    residual: Float[Tensor, " elements"],
    gradients: Float[Tensor, " elements"],
    gradient_threshold: Float[Tensor, ""],
    capacity: int,
    first_block: Int32[Tensor, ""],
) -> Int32[Tensor, " header_and_capacity"]:
    """Add a step's gradients r += g; move sign(r) tau into a message wherever then |r| >= tau.

    The message has room for `capacity` words. Elements are sent in order from `first_block`, round
    the model. The others remain in the residual, and `first_block` becomes the first block that has
    one of them. A capacity of BLOCK_ELEMENTS or `num_map_words` sends every element at last.
    A gradient that is not finite is marked in the message and remains in the residual.
    """
    size, num_words, device = len(residual), num_plane_words(len(residual)), residual.device
    num_blocks = -(-num_words // BLOCK_ROWS)
    planes = torch.empty(2, num_words, dtype=torch.int32, device=device)
    counts, starts = torch.empty(2, num_blocks, dtype=torch.int32, device=device)
    message = torch.empty(HEADER_WORDS + capacity, dtype=torch.int32, device=device)
    tau, rows = gradient_threshold, BLOCK_ROWS
    # Pass 1 streams all elements; pass 2 numbers the sent ones; pass 3 reads only those.
    accumulate[(num_blocks,)](
        residual, gradients, tau, planes, counts, size, num_words, rows, num_warps=8
    )
    map_words, at_once = num_map_words(size), COUNTS_AT_ONCE
    choose[(1,)](counts, starts, message, first_block, num_blocks, map_words, capacity, at_once)
    # One warp a block lets all blocks run at once: they mostly wait for memory.
    arguments = (residual, tau, planes, counts, starts, message, first_block, num_words, capacity)
    take[(num_blocks,)](*arguments, rows, num_warps=1)
    return message


def add_messages(
    counts: Int32[Tensor, " elements"], messages: Int32[Tensor, "ranks header_and_capacity"]
) -> None:
    """Add the signs of all ranks' messages to `counts`; integer sums do not depend on the order."""
    num_ranks, length = messages.shape
    capacity = length - HEADER_WORDS
    add_signs[(-(-capacity // BLOCK_ROWS), num_ranks)](
        counts, messages, num_plane_words(len(counts)), capacity, BLOCK_ROWS
    )
