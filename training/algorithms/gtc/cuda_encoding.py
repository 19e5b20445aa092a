"""Encode and decode messages on a GPU by Triton's kernels, without making the host wait.

A message with room for all elements that reach the threshold equals that of `encoding` bit for bit,
with unused space at its end. It takes three passes: `accumulate` streams the residual and the
gradients, `choose` numbers the elements to send, and `take` reads only the elements that
`accumulate` has marked. Triton comes only with torch's builds for CUDA: import this late.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from training.algorithms.gtc.encoding import (
    HEADER_WORDS,
    WORD_BITS,
    Encoding,
    num_map_words,
    num_plane_words,
)

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


# ruff: noqa: ANN001, ANN201, ANN202 - Triton defines the types of a kernel's values


INDICES = tl.constexpr(int(Encoding.INDICES))
MAP = tl.constexpr(int(Encoding.MAP))
NOT_FINITE = tl.constexpr(int(Encoding.NOT_FINITE))
HEADER = tl.constexpr(HEADER_WORDS)


@triton.jit
@no_type_check
def accumulate(
    residual, gradients, threshold, planes, counts, num_elements, num_words, num_rows: tl.constexpr
):
    """Add the gradients; mark in both planes the elements that reach tau, and count them by block.

    The count of a block with a NaN or an infinity is -1.
    """
    block = tl.program_id(0)
    rows = block.to(tl.int64) * num_rows + tl.arange(0, num_rows)
    lanes = tl.arange(0, 32)
    elements = rows[:, None] * 32 + lanes[None, :]
    if (block + 1).to(tl.int64) * num_rows * 32 <= num_elements:
        # A whole block needs no mask, and then loads four elements at a time.
        values = tl.load(residual + elements) + tl.load(gradients + elements)
        tl.store(residual + elements, values)
    else:
        inside = elements < num_elements
        values = tl.load(residual + elements, mask=inside, other=0.0)
        values += tl.load(gradients + elements, mask=inside, other=0.0)
        tl.store(residual + elements, values, mask=inside)
    # A NaN is not below the threshold; padding is 0, which is.
    reaches = ~(tl.abs(values) < tl.load(threshold))
    bits = tl.full([32], 1, tl.int32) << lanes
    sent = tl.sum(tl.where(reaches, bits[None, :], 0), 1)
    negative = tl.sum(tl.where(reaches & (values < 0), bits[None, :], 0), 1)
    tl.store(planes + rows, sent, mask=rows < num_words)
    tl.store(planes + num_words + rows, negative, mask=rows < num_words)
    is_broken = ~(tl.abs(values) < float("inf"))
    num_broken = tl.sum(tl.sum(is_broken.to(tl.int32), 1), 0)
    tl.store(counts + block, tl.where(num_broken > 0, -1, tl.sum(_num_ones(sent), 0)))


@triton.jit
@no_type_check
def choose(
    counts,
    starts,
    message,
    first_block,
    num_blocks,
    num_map_words,
    capacity,
    chunk_blocks: tl.constexpr,
):
    """Number the elements to send, in order from the first block, round the model.

    `starts` gets each block's first number; the message gets its header.
    """
    first = tl.load(first_block)
    total = 0
    before_first = 0
    num_broken = 0
    # The totals: how many elements are sent, and how many of them lie before the first block.
    for chunk in range(0, num_blocks, chunk_blocks):
        blocks = chunk + tl.arange(0, chunk_blocks)
        count = tl.load(counts + blocks, mask=blocks < num_blocks, other=0)
        num_broken += tl.sum((count < 0).to(tl.int32), 0)
        count = tl.maximum(count, 0)
        total += tl.sum(count, 0)
        before_first += tl.sum(tl.where(blocks < first, count, 0), 0)
    # The prefix sums: blocks before the first one are numbered after the last one.
    position = -before_first
    for chunk in range(0, num_blocks, chunk_blocks):
        blocks = chunk + tl.arange(0, chunk_blocks)
        count = tl.load(counts + blocks, mask=blocks < num_blocks, other=0)
        count = tl.maximum(count, 0)
        start = position + tl.cumsum(count, 0) - count
        start += tl.where(blocks < first, total, 0)
        tl.store(starts + blocks, start, mask=blocks < num_blocks)
        position += tl.sum(count, 0)
    # Without room for a map the message remains a list, and the residual keeps the rest.
    fits_map = (total > num_map_words) & (capacity >= num_map_words)
    encoding = tl.where(fits_map, MAP, INDICES)
    tl.store(message, tl.where(num_broken > 0, NOT_FINITE, encoding))
    tl.store(message + 1, total)


@triton.jit
@no_type_check
def take(
    residual,
    threshold,
    planes,
    counts,
    starts,
    message,
    first_block,
    num_words,
    capacity,
    num_rows: tl.constexpr,
):
    """Write the message's body, and subtract from the residual what the message has room for."""
    block = tl.program_id(0)
    encoding = tl.load(message)
    tau = tl.load(threshold)
    rows = block.to(tl.int64) * num_rows + tl.arange(0, num_rows)
    sent = tl.load(planes + rows, mask=rows < num_words, other=0)
    negative = tl.load(planes + num_words + rows, mask=rows < num_words, other=0)
    body = message + HEADER
    if encoding == INDICES:
        start = tl.load(starts + block)
        _take_indices(residual, tau, rows, sent, negative, start, body, capacity)
        # The block in which the room ends is the first of the next message.
        if (start <= capacity) & (start + tl.load(counts + block) > capacity):
            tl.store(first_block, block)
    if encoding == MAP:
        tl.store(body + rows, sent, mask=rows < num_words)
        tl.store(body + num_words + rows, negative, mask=rows < num_words)
        _take_all(residual, tau, planes, block, num_words, num_rows)


@triton.jit
@no_type_check
def _take_indices(residual, tau, rows, sent, negative, start, body, capacity):
    """Take one element of each row at a time, lowest first: few iterations at low density."""
    num_left = _num_ones(sent)
    position = start + tl.cumsum(num_left, 0) - num_left
    for _ in range(tl.max(num_left, 0)):
        lowest = sent & -sent
        element = rows * 32 + _num_ones(lowest - 1)
        is_taken = (sent != 0) & (position < capacity)
        is_negative = (negative & lowest) != 0
        value = tl.load(residual + element, mask=is_taken, other=0.0)
        value = tl.where(is_negative, value + tau, value - tau)
        tl.store(residual + element, value, mask=is_taken)
        word = element.to(tl.int32) | (is_negative.to(tl.int32) << 31)
        tl.store(body + position, word, mask=is_taken)
        sent = sent & (sent - 1)
        position += 1


@triton.jit
@no_type_check
def _take_all(residual, tau, planes, block, num_words, num_rows: tl.constexpr):
    """Subtract tau, with the element's sign, from all marked elements."""
    lanes = tl.arange(0, 32)
    for first in range(0, num_rows, 16):
        rows = block.to(tl.int64) * num_rows + first + tl.arange(0, 16)
        sent = tl.load(planes + rows, mask=rows < num_words, other=0)
        negative = tl.load(planes + num_words + rows, mask=rows < num_words, other=0)
        elements = rows[:, None] * 32 + lanes[None, :]
        is_taken = ((sent[:, None] >> lanes[None, :]) & 1) != 0
        is_negative = ((negative[:, None] >> lanes[None, :]) & 1) != 0
        values = tl.load(residual + elements, mask=is_taken, other=0.0)
        values = tl.where(is_negative, values + tau, values - tau)
        tl.store(residual + elements, values, mask=is_taken)


@triton.jit
@no_type_check
def _num_ones(words):
    """Return the number of 1 bits of each word: sums in fields of 2, 4, 8, then 32 bits."""
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
@no_type_check
def add_signs(counts, messages, num_words, capacity, num_rows: tl.constexpr):
    """Add one rank's message to the counts; each program handles a part of its body."""
    message = messages + tl.program_id(1).to(tl.int64) * (HEADER + capacity)
    encoding = tl.load(message)
    places = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    body = message + HEADER
    if encoding == INDICES:
        is_word = places < tl.minimum(tl.load(message + 1), capacity)
        word = tl.load(body + places, mask=is_word, other=0)
        sign = tl.where(word < 0, -1, 1)
        # Integer sums commute, so atomics in any order give the same counts.
        tl.atomic_add(counts + (word & 0x7FFFFFFF), sign, mask=is_word, sem="relaxed")
    if encoding == MAP:
        lanes = tl.arange(0, 32)
        sent = tl.load(body + places, mask=places < num_words, other=0)
        negative = tl.load(body + num_words + places, mask=places < num_words, other=0)
        is_sent = ((sent[:, None] >> lanes[None, :]) & 1) != 0
        sign = tl.where(((negative[:, None] >> lanes[None, :]) & 1) != 0, -1, 1)
        elements = places.to(tl.int64)[:, None] * 32 + lanes[None, :]
        tl.atomic_add(counts + elements, sign, mask=is_sent, sem="relaxed")
