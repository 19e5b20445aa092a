"""Digest tensors to 64 bits each, on their own device, to compare the replicas of a model.

The digest reads a tensor once, at the memory's speed: 7 ms for 25 M float32 on one CPU core. It is
a sum over short rows: the sum of a row's bits times an odd number of the row's own, modulo 2^64.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

ROW_WORDS = 64
WORD_BYTES = 8
ROW_BYTES = ROW_WORDS * WORD_BYTES
ODD_NUMBER = 0x1E3779B97F4A7C15


def digests(
    tensors: Sequence[Shaped[Tensor, "..."]], device: torch.device
) -> Int64[Tensor, " tensors"]:
    """Digest each tensor's bits where it lies, and collect them on `device`; no host waits.

    Two tensors of random differences have equal digests with a chance of 2^-64. Differences that
    cancel within one row, of 128 float32, are missed.
    """
    values = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors):
        values[number] = _digest(_bytes(tensor))
    return values


def combine(values: Int64[Tensor, " values"]) -> Int64[Tensor, ""]:
    """Digest digests, or other words, to one number; their order counts."""
    odd_numbers = (2 * torch.arange(len(values), device=values.device) + 1) * ODD_NUMBER
    return (values * odd_numbers).sum()


def _digest(data: UInt8[Tensor, " bytes"]) -> Int64[Tensor, ""]:
    num_rows = len(data) // ROW_BYTES
    body, rest = data[: num_rows * ROW_BYTES], data[num_rows * ROW_BYTES :]
    if body.storage_offset() % WORD_BYTES:  # torch reads words at multiples of their size alone
        body = body.clone()
    row_sums = body.view(torch.int64).view(num_rows, ROW_WORDS).sum(1)
    last_row = data.new_zeros(ROW_BYTES)
    last_row[: len(rest)] = rest
    # Each word of the last row counts as a row, so that no difference in a bias cancels.
    return combine(torch.cat([last_row.view(torch.int64), row_sums])) + len(data)


def _bytes(tensor: Shaped[Tensor, "..."]) -> UInt8[Tensor, " bytes"]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
