"""Write k ascending indices below n in k (2 + log2(n / k)) bits at most (Elias 1974, Fano 1971).

Each index is split: its low bits are written as they are, and its high bits in unary. Index i of
high part h is a one at bit i + h; the zeros between ones count the steps of h. This takes 7 bits an
index for 3 % of 4096, half a bit more than any code needs, and its length follows from n and k.
"""

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from training.algorithms.sparsification.message_lengths import num_low_bits, num_unary_bits


def unary_bits(
    indices: Int64[Tensor, "rows indices"], num_values: int
) -> Bool[Tensor, "rows bits"]:
    """Write the high parts of each row's indices, which ascend."""
    num_rows, num_indices = indices.shape
    places = indices >> num_low_bits(num_values, num_indices)
    places += torch.arange(num_indices, device=indices.device)
    num_bits = num_unary_bits(num_values, num_indices)
    bits = torch.zeros(num_rows, num_bits, dtype=torch.bool, device=indices.device)
    return bits.scatter_(1, places, value=True)


def high_parts(
    bits: Bool[Tensor, "rows bits"], num_indices: int
) -> Int64[Tensor, "rows {num_indices}"]:
    """Invert `unary_bits`: return each row's indices without their low bits."""
    places = bits.nonzero_static(size=num_indices * len(bits))[:, 1].view(-1, num_indices)
    high: Tensor = places - torch.arange(num_indices, device=bits.device)
    return high
