"""Exchanges between the ranks of an explicit process group; nothing here falls back to the world.

Every exchange is bounded by the time limit that its group was made with.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup as ProcessGroup  # noqa: PLC0414 - exported, for annotations
from torch.distributed.rendezvous import rendezvous

from infra.torchrun import end_with_launcher, launched_rank
from training.distributed.failure_detector import FailureDetector
from training.distributed.rendezvous import join

_failure_detector: FailureDetector | None = None


class CollectiveError(RuntimeError):
    """An exchange failed or ran past its time limit; the message names what to check."""


@contextmanager
def open_world(time_limit_s: float = 1800.0) -> Iterator[ProcessGroup]:
    """Join the ranks that torchrun started, or be the only rank where it did not; leave at the end.

    `time_limit_s` bounds every exchange: it must exceed the longest time that one rank works (say,
    evaluates) while the others wait. Raises CollectiveError where ranks do not come in that time.
    """
    time_limit = timedelta(seconds=time_limit_s)
    try:
        if dist.is_torchelastic_launched():
            _meet(time_limit)
        else:
            dist.init_process_group(
                init_method="tcp://127.0.0.1:0", rank=0, world_size=1, timeout=time_limit
            )
        with ending_by_name():
            yield default_world()
    finally:
        _part()


def _meet(time_limit: timedelta) -> None:
    global _failure_detector  # noqa: PLW0603 - as torch's default group, one in a process
    end_with_launcher()
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=time_limit))
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {launched_rank()} found no store to meet the others in: {error}. Check that "
            "torchrun is alive, and that hosts reach the one that it was given as the rendezvous's"
        ) from error
    with _explained_on(rank, world_size, "meeting"):
        members = join(store, rank, world_size, time_limit.total_seconds())
    _failure_detector = FailureDetector(store.clone(), members, rank)
    with _explained_on(rank, world_size, "meeting"):
        dist.init_process_group(
            store=PrefixStore(members.prefix, store),
            rank=rank,
            world_size=world_size,
            timeout=time_limit,
        )


def _part() -> None:
    global _failure_detector  # noqa: PLW0603
    if _failure_detector is not None:
        _failure_detector.close()
        _failure_detector = None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def ending_by_name() -> Iterator[None]:
    """Tell the other ranks of the world what ended this one, if something does."""
    try:
        yield
    except BaseException as error:
        if _failure_detector is not None and not isinstance(error, CollectiveError):
            _failure_detector.end(f"{type(error).__name__}: {error}")
        raise


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


def explained(operation: str, group: ProcessGroup) -> AbstractContextManager[None]:
    """Raise CollectiveError, with who is at fault, where the exchange within fails."""
    return _explained_on(group.rank(), group.size(), operation)


@contextmanager
def _explained_on(rank: int, size: int, operation: str) -> Iterator[None]:
    with nullcontext() if _failure_detector is None else _failure_detector.within(operation):
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            fault = "" if _failure_detector is None else f"{_failure_detector.find_fault()}: "
            raise CollectiveError(
                f"{operation} failed on rank {rank} of {size}: {fault}{error}. Check that "
                "every rank is alive (the first error in the ranks' logs is the cause), that all "
                "take the same number of steps, and that their hosts reach each other "
                "(GLOO_SOCKET_IFNAME, firewall); a rank that is only slow needs a group with a "
                "longer time limit"
            ) from error


def add(values: Shaped[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values` by their sum over the ranks, bitwise the same on each."""
    with explained("sum", group):
        group.allreduce(values).wait()


def maximum(value: int, group: ProcessGroup) -> int:
    """Return the largest of the ranks' values, to all of them."""
    values = torch.empty(group.size(), dtype=torch.int64)
    with explained("maximum", group):
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
    with explained("broadcast", group):
        group.broadcast(data, 0).wait()
    values.copy_(data.view(values.dtype).view(values.shape))
