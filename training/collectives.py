"""Exchanges between the ranks of an explicit process group; nothing here falls back to the world.

Every exchange is bounded by the time limit that its group was made with.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float, Int32, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup


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
    return not dist.is_torchelastic_launched() or int(os.environ["RANK"]) == 0


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
    """Replace `values` by their sum over the ranks, bitwise the same on each."""
    with _explained("sum", group):
        group.allreduce(values).wait()


def maximum(value: int, group: ProcessGroup) -> int:
    """Return the largest of the ranks' values, to all of them."""
    values = torch.tensor([value])
    with _explained("maximum", group):
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values)


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
    values: Int32[Tensor, " values"], group: ProcessGroup
) -> list[Int32[Tensor, " values_of_rank"]]:
    """Every rank's `values`, in rank order; each rank may have another number of them, or none."""
    # gloo's all-gather wants equal lengths: exchange the lengths first, then pad.
    lengths = values.new_empty(group.size())
    with _explained("gather of lengths", group):
        group.all_gather_single(lengths, values.new_tensor([len(values)])).wait()
    longest = int(lengths.max())
    if longest == 0:
        return [values[:0]] * group.size()
    padded = values.new_zeros(longest)
    padded[: len(values)] = values
    gathered = values.new_empty(group.size() * longest)
    with _explained("gather", group):
        group.all_gather_single(gathered, padded).wait()
    rows = gathered.view(group.size(), longest)
    return [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]


def gather_text(text: str, group: ProcessGroup, device: torch.device) -> list[str]:
    """Every rank's `text`, in rank order, through memory of `device`."""
    codes = torch.tensor([ord(character) for character in text], dtype=torch.int32, device=device)
    return ["".join(map(chr, row.tolist())) for row in gather(codes, group)]


@dataclass(frozen=True, slots=True)
class Tiers:
    """Two tiers of ranks: groups of `group_size`, and above them the leaders, the groups' first.

    `lower` is this rank's group, None where it is alone in it; `upper` joins the leaders, and is
    None on all other ranks.
    """

    lower: ProcessGroup | None
    upper: ProcessGroup | None

    @classmethod
    def of(cls, group: ProcessGroup, group_size: int, device: torch.device) -> "Tiers":
        """Divide `group` into groups of consecutive ranks; all ranks must call this together.

        Raises ValueError where there are two tiers to make and `group` is not the whole world.
        """
        if group_size == 1:
            return cls(None, group)
        if group_size == group.size():
            return cls(group, None)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) != default_world().size():
            # torch's ways to make a group without the other ranks hang: new_group's names depend on
            # how many groups a rank is in already, gloo's split_group fails every third time.
            raise ValueError(
                f"a group of {len(ranks)} of {default_world().size()} ranks: need the group of all "
                "ranks, or start a world with just these"
            )
        parts = [ranks[first : first + group_size] for first in range(0, len(ranks), group_size)]
        subgroups = [_subgroup(group, part, device) for part in parts]
        upper = _subgroup(group, ranks[::group_size], device)
        return cls(subgroups[group.rank() // group_size], upper)

    def average(self, values: Float[Tensor, "..."]) -> None:
        """Replace `values`, the same within a lower group, by their mean over the groups."""
        if self.upper is not None:
            average(values, self.upper)
        if self.lower is not None:
            broadcast(values, self.lower)


def _subgroup(group: ProcessGroup, ranks: list[int], device: torch.device) -> ProcessGroup | None:
    # new_group would otherwise take torch's default limit, not that of the group it divides.
    time_limit = group._get_backend(device).options._timeout
    backend = dist.get_backend_config(group)
    subgroup = dist.new_group(ranks, timeout=time_limit, backend=backend)
    return subgroup if isinstance(subgroup, ProcessGroup) else None
