"""Open the process group of all ranks, and explain why one of its exchanges failed.

Every exchange is bounded by the time limit of its group.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import ProcessGroup as ProcessGroup  # noqa: PLC0414 - exported, for annotations
from torch.distributed.rendezvous import rendezvous as open_store

from infra.torchrun import end_with_launcher, launched_rank
from training.distributed.failures import (
    FailureDetector,
    ending_process_after,
    failure_message,
    rendezvous,
)
from training.distributed.simulated_group import SimulatedGroup

CPU = torch.device("cpu")

WATCHDOG_DELAY_S = 30.0
"""NCCL's watchdog ends a process so long after the failure detector should have."""

LEAVING_LIMIT_S = 30.0
"""A rank ends at the latest so long after its error, or after the others' time to leave, too."""

_failure_detector: FailureDetector | None = None


class CollectiveError(RuntimeError):
    """CollectiveError reports an exchange that failed or took too long, and what to check."""


@contextmanager
def open_world(time_limit_s: float = 1800.0, device: torch.device = CPU) -> Iterator[ProcessGroup]:
    """Open the group of all ranks that torchrun started, or of one rank without torchrun.

    `device` is where this rank's model lies, a GPU of its own; it becomes torch's current one. NCCL
    exchanges what lies on GPUs, gloo all else.
    `time_limit_s` bounds every exchange, and with 30 s more the closing of the group. It must
    exceed the longest time that one rank works (say, evaluates) while the others wait. Raises
    CollectiveError if ranks do not come in that time.
    """
    time_limit = timedelta(seconds=time_limit_s)
    if device.type == "cuda":
        # NCCL and set_device() want a number, which "cuda" has not: torch's current one is meant.
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(device := torch.device("cuda", number))
    try:
        if dist.is_torchelastic_launched():
            _init_launched_group(time_limit, device)
        else:
            dist.init_process_group(
                _backends(),
                store=HashStore(),  # of this process: no other rank needs an address
                rank=0,
                world_size=1,
                timeout=time_limit,
                device_id=_bound(device),
            )
        with reporting_failure():
            yield default_world()
    except BaseException as error:
        # NCCL's shutdown waits for exchanges of which a dead rank takes no part, and the failure
        # detector has ended by then: only the watchdog would end this process.
        text = f"rank {launched_rank()} ended: {type(error).__name__}: {error}"
        with ending_process_after(LEAVING_LIMIT_S, text):
            _destroy_group()
        raise
    else:
        # Other ranks may leave later by no more than an exchange takes; a dead one never does.
        text = (
            f"rank {launched_rank()} has done its work, and its group does not close: another rank "
            "ended before it left: see its log for the first error"
        )
        with ending_process_after(time_limit_s + LEAVING_LIMIT_S, text):
            _destroy_group()


def _backends() -> str:
    """Return gloo for tensors on the CPU; NCCL, where there is a GPU, for those that lie there."""
    # By default torch has NCCL alone on a host with a GPU, and no exchange of a CPU's tensors.
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_nccl else "cpu:gloo"


def _bound(device: torch.device) -> torch.device | None:
    """Return the GPU that NCCL connects at once, rather than at its first exchange."""
    return device if device.type == "cuda" else None


def _init_launched_group(time_limit: timedelta, device: torch.device) -> None:
    global _failure_detector  # noqa: PLW0603 - as torch's default group, one in a process
    # Ranks outlive a killed torchrun, and would write the next start's checkpoints.
    end_with_launcher()
    try:
        # torch tries a store that does not answer twice for the limit: 40 s for one of 20.
        store, rank, world_size = next(open_store("env://", timeout=time_limit / 2))
        store.set_timeout(time_limit)
        # Stores of torch 2.6 have no clone(), but their own process may connect to them again.
        can_clone = hasattr(store, "clone")
        second = store.clone() if can_clone else next(open_store("env://", timeout=time_limit))[0]
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {launched_rank()} cannot reach the rendezvous store: {error}. Check that "
            "torchrun is alive, and that every host reaches torchrun's rendezvous endpoint"
        ) from error
    with _explaining_failure(rank, world_size, "rendezvous"):
        # Plain init_process_group() found dead ranks' addresses after a restart, and hung.
        members = rendezvous(store, rank, world_size, time_limit.total_seconds(), device.type)
    if difference := members.first_difference():
        raise CollectiveError(
            f"ranks train on different devices: {difference}: need all on GPUs or all on CPUs: "
            "see that every host has its GPUs, or start all with --device cpu"
        )
    limit_s = time_limit.total_seconds()
    _failure_detector = FailureDetector(
        second, members, rank, limit_s, watches_devices="cuda" in _backends()
    )
    with _explaining_failure(rank, world_size, "rendezvous"):
        dist.init_process_group(
            _backends(),
            store=PrefixStore(members.prefix, store),
            rank=rank,
            world_size=world_size,
            timeout=time_limit,
            device_id=_bound(device),
        )
    if "nccl" in _backends():
        # NCCL's watchdog names no rank: it comes second.
        backend = default_world()._get_backend(torch.device("cuda"))
        backend._set_default_timeout(time_limit + timedelta(seconds=WATCHDOG_DELAY_S))


def _destroy_group() -> None:
    global _failure_detector  # noqa: PLW0603
    if _failure_detector is not None:
        _failure_detector.close()
        _failure_detector = None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def reporting_failure() -> Iterator[None]:
    """Report an error that ends this rank to the other ranks of the world."""
    try:
        yield
    except BaseException as error:
        if _failure_detector is not None and not isinstance(error, CollectiveError):
            _failure_detector.report_end(f"{type(error).__name__}: {error}")
        raise


def default_world() -> ProcessGroup:
    """Return the group of all ranks; raise RuntimeError before it is open."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RuntimeError(
            "there is no process group yet: call within process_group.open_world(), or after "
            "torch.distributed.init_process_group()"
        )
    return dist.group.WORLD


def check_member(group: ProcessGroup) -> None:
    """Raise ValueError if this process is not one of the group's ranks."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group = {group!r}: need a process group that this rank is in, such as "
            "process_group.default_world()"
        )


def wait_for(work: dist.Work, values: Shaped[Tensor, "..."], exchange: str) -> None:
    """Wait for an exchange of `values`; those of a GPU its stream waits for, and the host does not.

    A rank that is dead by then makes the failure detector end this process.
    """
    if _failure_detector is not None and not is_read_at_once(values.device):
        _failure_detector.watch(exchange, work)
    work.wait()


def is_read_at_once(device: torch.device) -> bool:
    """Return whether the host reads tensors of `device` without waiting for work under way."""
    return device.type == "cpu"


def explaining_failure(operation: str, group: ProcessGroup) -> AbstractContextManager[None]:
    """Raise CollectiveError, with the ranks at fault, if the exchange within fails."""
    return _explaining_failure(group.rank(), group.size(), operation)


@contextmanager
def _explaining_failure(rank: int, size: int, operation: str) -> Iterator[None]:
    with nullcontext() if _failure_detector is None else _failure_detector.in_exchange(operation):
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            # gloo's error names no rank; the failure detector asks which ones still answer.
            fault = "" if _failure_detector is None else f"{_failure_detector.diagnose()}: "
            message = failure_message(operation, rank, size, f"{fault}{error}")
            raise CollectiveError(message) from error


def world_ranks(group: ProcessGroup) -> list[int]:
    """Return the ranks of a group that may be divided; ValueError where it is not the world's."""
    if isinstance(group, SimulatedGroup):
        return list(range(group.size()))
    ranks = dist.get_process_group_ranks(group)
    world_size = default_world().size()
    if len(ranks) != world_size:
        # torch's ways to make a group without the other ranks hang: new_group's names depend on
        # how many groups a rank is in already, gloo's split_group fails every third time.
        raise ValueError(
            f"a group of {len(ranks)} of {world_size} ranks: need the group of all ranks, or "
            "start a world with just these"
        )
    return ranks


def subgroup_of(group: ProcessGroup, ranks: list[int], device: torch.device) -> ProcessGroup | None:
    """Make a group of some ranks, None on the others; all ranks must call this together."""
    if isinstance(group, SimulatedGroup):
        return group.subgroup(ranks)
    # new_group would otherwise take torch's default limit, not that of the group it divides.
    time_limit = group._get_backend(device).options._timeout
    backend = dist.get_backend_config(group)
    with explaining_failure("making of groups", group):
        subgroup = dist.new_group(ranks, timeout=time_limit, backend=backend)
    return subgroup if isinstance(subgroup, ProcessGroup) else None
