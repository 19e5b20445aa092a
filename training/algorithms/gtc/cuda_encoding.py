"""Gradient threshold compression on a GPU, without the host waiting for it.

Where a message has room for all that reaches the threshold, it is that of `encoding`, to
the bit, with space left at its end. Triton comes with torch's builds for CUDA: import this late.
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
"""Rows of 32 elements, one word of a plane each, that one program sees."""

BLOCK_ELEMENTS = WORD_BITS * BLOCK_ROWS
COUNTS_AT_ONCE = 4096


def take_message(
    residual: Float[Tensor, " elements"],
    gradients: Float[Tensor, " elements"],
    gradient_threshold: Float[Tensor, ""],
    capacity: int,
    first_block: Int32[Tensor, ""],
) -> Int32[Tensor, " header_and_capacity"]:
    """Add a step's gradients to `residual`; move +-gradient_threshold out of what then reaches it.

    Of more than `capacity` elements those are sent that come first from `first_block` on, round the
    model; the others stay, and `first_block` becomes the first block of which one stayed. With at
    least BLOCK_ELEMENTS, or `num_map_words`, of capacity nothing stays for ever. A gradient that is
    not finite is marked in the message, and stays in the residual, so that no later step hides it.
    """
    size, num_words, device = len(residual), num_plane_words(len(residual)), residual.device
    num_blocks = -(-num_words // BLOCK_ROWS)
    planes = torch.empty(2, num_words, dtype=torch.int32, device=device)
    counts, starts = torch.empty(2, num_blocks, dtype=torch.int32, device=device)
    message = torch.empty(HEADER_WORDS + capacity, dtype=torch.int32, device=device)
    tau, rows = gradient_threshold, BLOCK_ROWS
    accumulate[(num_blocks,)](
        residual, gradients, tau, planes, counts, size, num_words, rows, num_warps=8
    )
    map_words, at_once = num_map_words(size), COUNTS_AT_ONCE
    choose[(1,)](counts, starts, message, first_block, num_blocks, map_words, capacity, at_once)
    # One warp a block, so that all blocks run at once: they mostly wait for memory.
    arguments = (residual, tau, planes, counts, starts, message, first_block, num_words, capacity)
    take[(num_blocks,)](*arguments, rows, num_warps=1)
    return message


def add_messages(
    counts: Int32[Tensor, " elements"], messages: Int32[Tensor, "ranks header_and_capacity"]
) -> None:
    """Add the signs of all ranks' messages to `counts`: integers, so no order can matter."""
    num_ranks, length = messages.shape
    capacity = length - HEADER_WORDS
    add_signs[(-(-capacity // BLOCK_ROWS), num_ranks)](
        counts, messages, num_plane_words(len(counts)), capacity, BLOCK_ROWS
    )
