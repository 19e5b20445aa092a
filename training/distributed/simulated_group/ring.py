"""Sum over ranks in the order of gloo's ring, so that simulated ranks get the bits of real ones."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

# gloo/allreduce.cc: each rank's chunk is at least two segments, none above 1 MB.
SEGMENTS_PER_RANK = 2
MAX_SEGMENT_BYTES = 2**20


def ring_sum(inputs: Sequence[Shaped[Tensor, "..."]]) -> Shaped[Tensor, "..."]:
    """Sum the inputs of all ranks, given in rank order, as `gloo::allreduce` does.

    Chunk c of the values starts at rank c - 1 and passes c - 2, c - 3, ..., c; each adds its own.
    """
    num_ranks = len(inputs)
    flat = [values.reshape(-1) for values in inputs]
    size = chunk_elements(flat[0], num_ranks)
    chunks = [torch.split(values, size) for values in flat]
    total = []
    # Reduce-scatter: the partial sum of a chunk passes round the ring once.
    for number in range(len(chunks[0])):
        chunk = chunks[(number - 1) % num_ranks][number].clone()
        for step in range(2, num_ranks + 1):
            chunk += chunks[(number - step) % num_ranks][number]
        total.append(chunk)
    return torch.cat(total).view(inputs[0].shape)


def chunk_elements(values: Shaped[Tensor, " values"], num_ranks: int) -> int:
    """Return the number of elements in one rank's chunk of `values`."""
    element_bytes = values.element_size()
    num_bytes = max(values.numel(), 1) * element_bytes
    min_segments = num_ranks * SEGMENTS_PER_RANK
    largest = MAX_SEGMENT_BYTES // element_bytes * element_bytes
    segment_bytes = min(math.ceil(num_bytes / min_segments), largest)
    segment_bytes = math.ceil(segment_bytes / element_bytes) * element_bytes
    segments = max(math.ceil(num_bytes / segment_bytes), min_segments)
    per_rank = math.ceil(segments / num_ranks)
    per_rank += per_rank % SEGMENTS_PER_RANK
    return per_rank * segment_bytes // element_bytes
