"""Quantize a vector to one bit an element, and keep the error for the next time (paper 004 3).

A message is a vector of 32-bit words. First come two float32 reconstruction values for each column:
all columns' means of the elements from 0 up, then all columns' means of those below. One bit for
each element follows, lowest bit first, set from 0 up.
"""

import torch
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from training.algorithms.one_bit.columns import Columns

WORD_BITS = 32
_OCTET_BITS = 8
# An octet in each of a word's 8 bytes; of the k-th byte, counted from the lowest, only bit k.
_EACH_BYTE = 0x0101_0101_0101_0101
_ISOLATE_BITS = sum(1 << 9 * bit for bit in range(_OCTET_BITS)) - (1 << 64)
# Multiplied by a 0 or 1 in each of 8 bytes, this collects them in the highest byte, without carry.
_COLLECT_OCTET = sum(1 << 56 - 7 * bit for bit in range(_OCTET_BITS))


def num_bit_words(num_elements: int) -> int:
    """Return the number of words of one bit for each element, 1/32 of the words of float32."""
    return -(-num_elements // WORD_BITS)


def num_message_words(columns: Columns) -> int:
    """Return the number of words of every message of these columns, 4 bytes each."""
    return 2 * columns.num_columns + num_bit_words(columns.num_elements)


def num_message_bytes(columns: Columns) -> int:
    """Return the number of bytes of every message of these columns."""
    return 4 * num_message_words(columns)


def take_message(
    residual: Float[Tensor, " elements"], gradients: Float[Tensor, " elements"], columns: Columns
) -> Int32[Tensor, " words"]:
    """Add a step's gradients r += g; move Q^-1(Q(r)) from the residual into a message.

    Section 3 as printed keeps Delta = G - Q^-1, which drops the error carried in. Only what is kept
    here, Delta = (G + Delta_before) - Q^-1, adds every gradient up into the model. A gradient that
    is not finite makes neither message nor residual finite: resume from a checkpoint.
    """
    residual.add_(gradients)
    num_words, device = num_bit_words(len(residual)), residual.device
    bits = torch.zeros(WORD_BITS * num_words, dtype=torch.bool, device=device)
    values = torch.empty(2, columns.num_columns, dtype=torch.float32, device=device)
    for block in columns.blocks(device):
        r = block.rows(residual)
        # The threshold is 0. A mean minimizes the square error of its side; no element has mean 0.
        upper = r >= 0
        num_upper = upper.sum(1, dtype=torch.int32)
        above = r.clamp(min=0).sum(1) / num_upper.clamp(min=1)
        below = r.clamp(max=0).sum(1) / (block.column_size - num_upper).clamp(min=1)
        means = torch.stack([above, below]).float()
        bits[block.elements] = upper.flatten()
        values[:, block.columns] = means
        residual[block.elements] -= _unquantized(upper, means).flatten()
    return torch.cat([values.view(torch.int32).flatten(), _packed(bits)])


def add_message(
    total: Float[Tensor, " elements"], message: Int32[Tensor, " words"], columns: Columns
) -> None:
    """Add a message's unquantized values Q^-1 to `total`; ValueError for another length."""
    if len(message) != num_message_words(columns):
        raise ValueError(
            f"a message of {len(message)} words: need {num_message_words(columns)} for "
            f"{len(total)} parameters in {columns.num_columns} columns; start all ranks with one "
            "model"
        )
    values = message[: 2 * columns.num_columns].view(torch.float32).view(2, -1)
    upper = _unpacked(message[2 * columns.num_columns :])
    for block in columns.blocks(total.device):
        unquantized = _unquantized(block.rows(upper), values[:, block.columns])
        total[block.elements] += unquantized.flatten()


def _unquantized(
    upper: Bool[Tensor, "columns size"], means: Float32[Tensor, "2 columns"]
) -> Float32[Tensor, "columns size"]:
    """Return a column's first mean where `upper` is set, and its second elsewhere."""
    # torch.where() takes 5 to 8 ns an element on a CPU, for it cannot foresee a random bit; a mask
    # of all bits or none takes 0.5.
    above, below = means.view(torch.int32)[:, :, None]
    mask = upper.to(torch.int32).neg_()
    return mask.bitwise_and_(above ^ below).bitwise_xor_(below).view(torch.float32)


def _packed(bits: Bool[Tensor, " bits"]) -> Int32[Tensor, " words"]:
    """Return eight bits an octet; overwrites `bits`."""
    octets = bits.view(torch.int64).mul_(_COLLECT_OCTET) >> 56
    return octets.to(torch.uint8).view(torch.int32)


def _unpacked(words: Int32[Tensor, " words"]) -> Bool[Tensor, " bits"]:
    octets = words.contiguous().view(torch.uint8).to(torch.int64)
    # 127 more sets a byte's highest bit where there is one; the shift moves it to the lowest.
    isolated = octets.mul_(_EACH_BYTE).bitwise_and_(_ISOLATE_BITS)
    ones = isolated.add_(127 * _EACH_BYTE).bitwise_right_shift_(7).bitwise_and_(_EACH_BYTE)
    return ones.view(torch.bool)
