"""Exchanges between the ranks of an explicit process group; nothing here falls back to the world.

Every exchange is bounded by the time limit that its group was made with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from zlib import crc32

import torch
import torch.distributed as dist
from jaxtyping import Float, Int32, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup  # noqa: PLC0414 - exported, for annotations

from infra.launch import launched_rank


class CollectiveError(RuntimeError):
    """An exchange failed or ran past its time limit; the message names what to check."""


@contextmanager
def open_world(time_limit_s: float = 1800.0) -> Iterator[ProcessGroup]:
    """Join the ranks that torchrun started, or be the only rank where it did not; leave at the end.

    Once in a process: torch cannot meet again under one torchrun rendezvous.
    `time_limit_s` bounds every exchange: it must exceed the longest time that one rank works (say,
    evaluates) while the others wait.
    """
    time_limit = timedelta(seconds=time_limit_s)
    if dist.is_torchelastic_launched():
        dist.init_process_group(timeout=time_limit)
    else:
        dist.init_process_group(
            init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=time_limit
        )
    try:
        yield default_world()
    finally:
        dist.destroy_process_group()


def default_world() -> ProcessGroup:
    """Return the group of all ranks, for callers that want just that."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RuntimeError(
            "there is no process group yet: call within collectives.open_world(), or after "
            "torch.distributed.init_process_group()"
        )
    return dist.group.WORLD


def is_leader() -> bool:
    """Whether this process is the first that torchrun started, or the only one."""
    return launched_rank() == 0


def check_member(group: ProcessGroup) -> None:
    """Raise ValueError where this process is not one of the group's ranks."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group = {group!r}: need a process group that this rank is in, such as "
            "collectives.default_world()"
        )


@contextmanager
def _explained(operation: str, group: ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(
            f"{operation} failed on rank {group.rank()} of {group.size()}: {error}. Check that "
            "every rank is alive (the first error in the ranks' logs is the cause), that all take "
            "the same number of steps, and that their hosts reach each other "
            "(GLOO_SOCKET_IFNAME, firewall); a rank that is only slow needs a group with a "
            "longer time limit"
        ) from error


def add(values: Shaped[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values` by their sum over the ranks, added up in rank order.

    The order fixes the bits: gloo, NCCL and ranks inside one process give the same. Each rank adds
    up a stripe that all send it, and sends the sum to all: no more bytes than a ring.
    """
    size = group.size()
    if size == 1:
        return
    num_values = values.numel()
    stripes = values.new_zeros(size, -(-num_values // size))
    stripes.view(-1)[:num_values] = values.reshape(-1)
    received = torch.empty_like(stripes)
    with _explained("sum", group):
        group.all_to_all_single(received.view(-1), stripes.view(-1), [], []).wait()
        total = received[0].clone()
        for stripe in received[1:]:
            total += stripe
        group.all_gather_single(stripes.view(-1), total).wait()
    values.copy_(stripes.view(-1)[:num_values].view(values.shape))


def maximum(value: int, group: ProcessGroup) -> int:
    """Return the largest of the ranks' values, to all of them."""
    values = torch.empty(group.size(), dtype=torch.int64)
    with _explained("maximum", group):
        group.all_gather_single(values, torch.tensor([value])).wait()
    return int(values.max())


def barrier(group: ProcessGroup) -> None:
    """Wait until every rank is here."""
    maximum(0, group)


def average(values: Float[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values` by their mean over the ranks, bitwise the same on each."""
    add(values, group)
    values /= group.size()


def broadcast(values: Shaped[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values`, of any type, by those of the group's rank 0."""
    if values.numel() == 0:
        return
    # As bytes: gloo knows neither bool nor complex numbers.
    data = values.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    with _explained("broadcast", group):
        group.broadcast(data, 0).wait()
    values.copy_(data.view(values.dtype).view(values.shape))


def gather(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> list[Int32[Tensor, " values_of_rank"]]:
    """Every rank's `values`, in rank order; each rank may have another number of them, or none.

    Raises CollectiveError where a rank gathers for another purpose, so that one rank's last step is
    never taken for another's next.
    """
    lengths = _gather_lengths(values, group, purpose)
    longest = max(lengths)
    if longest == 0:
        return [values[:0]] * group.size()
    padded = values.new_zeros(longest)
    padded[: len(values)] = values
    gathered = values.new_empty(group.size() * longest)
    with _explained(f"gather of {purpose}", group):
        group.all_gather_single(gathered, padded).wait()
    rows = gathered.view(group.size(), longest)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _gather_lengths(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> list[int]:
    # gloo's all-gather wants equal lengths: exchange the lengths first, then pad.
    header = values.new_tensor([len(values), crc32(purpose.encode()) >> 1])
    gathered = values.new_empty(group.size() * len(header))
    with _explained(f"gather of {purpose}", group):
        group.all_gather_single(gathered, header).wait()
        headers = gathered.view(group.size(), len(header))
        elsewhere = (headers[:, 1] != header[1]).nonzero().squeeze(1).tolist()
        if elsewhere:
            raise RuntimeError(f"ranks {elsewhere} are at another point of training")
    return [int(length) for length in headers[:, 0]]


def gather_text(text: str, group: ProcessGroup, purpose: str, device: torch.device) -> list[str]:
    """Every rank's `text`, in rank order, through memory of `device`."""
    codes = torch.tensor([ord(character) for character in text], dtype=torch.int32, device=device)
    return ["".join(map(chr, row.tolist())) for row in gather(codes, group, purpose)]
