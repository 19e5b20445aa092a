"""Collective operations between the ranks of an explicit process group, never of a default one."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from training.distributed.process_group import ProcessGroup, explaining_failure, wait_for
from training.distributed.traffic import broadcast_wire_bytes, count_sent, sum_wire_bytes


def all_reduce_sum(values: Shaped[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values` by their sum over the ranks, bitwise the same on each rank."""
    count_sent(values.nbytes, group, sum_wire_bytes(values.nbytes, group.size()))
    with explaining_failure("sum", group):
        wait_for(group.allreduce(values), values, "sum")


def all_reduce_mean(values: Float[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values` by their mean over the ranks, bitwise the same on each rank."""
    all_reduce_sum(values, group)
    values /= group.size()


def maximum(value: int, group: ProcessGroup) -> int:
    """Return the largest of the ranks' values on every rank."""
    values = torch.empty(group.size(), dtype=torch.int64)
    with explaining_failure("maximum", group):
        group.all_gather_single(values, torch.tensor([value])).wait()
    return int(values.max())


def barrier(group: ProcessGroup) -> None:
    """Wait until every rank has called this."""
    maximum(0, group)


def broadcast(values: Shaped[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values`, of any type, by those of the group's rank 0."""
    if values.numel() == 0:
        return
    num_bytes = values.nbytes if group.rank() == 0 else 0
    wire_bytes = broadcast_wire_bytes(values.nbytes, group.rank(), group.size())
    count_sent(num_bytes, group, wire_bytes)
    # As bytes: gloo knows neither bool nor complex numbers.
    data = values.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    with explaining_failure("broadcast", group):
        wait_for(group.broadcast(data, 0), data, "broadcast")
    values.copy_(data.view(values.dtype).view(values.shape))
