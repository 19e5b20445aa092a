"""Exchanges between the ranks of an explicit process group; nothing here falls back to the world.

Every exchange is bounded by the time limit that its group was made with.
"""

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from jaxtyping import Float, Int32, Shaped
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup as ProcessGroup  # noqa: PLC0414 - exported, for annotations
from torch.distributed.rendezvous import rendezvous

from infra.launch import end_with_launcher, launched_rank
from training.joining import join
from training.roll_call import RollCall

MAX_ROOM = 2**16
"""Values that may travel along with their number: of 1 MB a ring is faster than copies."""

HOST_NAME_BYTES = 256

_known: "WeakKeyDictionary[ProcessGroup, _Known]" = WeakKeyDictionary()

_roll_call: RollCall | None = None


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
    global _roll_call  # noqa: PLW0603 - as torch's default group, one in a process
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
    _roll_call = RollCall(store.clone(), members, rank)
    with _explained_on(rank, world_size, "meeting"):
        dist.init_process_group(
            store=PrefixStore(members.prefix, store),
            rank=rank,
            world_size=world_size,
            timeout=time_limit,
        )


def _part() -> None:
    global _roll_call  # noqa: PLW0603
    if _roll_call is not None:
        _roll_call.close()
        _roll_call = None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def ending_by_name() -> Iterator[None]:
    """Tell the other ranks of the world what ended this one, if something does."""
    try:
        yield
    except BaseException as error:
        if _roll_call is not None and not isinstance(error, CollectiveError):
            _roll_call.end(f"{type(error).__name__}: {error}")
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
    with nullcontext() if _roll_call is None else _roll_call.within(operation):
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            fault = "" if _roll_call is None else f"{_roll_call.find_fault()}: "
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


def gather(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> list[Int32[Tensor, " values_of_rank"]]:
    """Every rank's `values`, in rank order; each rank may have another number of them, or none.

    Raises CollectiveError where a rank gathers for another purpose, so that one rank's last step is
    never taken for another's next.
    """
    lengths, beginnings = _gather_beginnings(values, group, purpose)
    longest = max(lengths)
    if longest <= beginnings.shape[1]:
        rows = beginnings
    else:
        padded = values.new_zeros(longest)
        padded[: len(values)] = values
        rows = gather_equal(padded, group, purpose)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _gather_beginnings(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> tuple[list[int], Int32[Tensor, "ranks room"]]:
    """How many values each rank has; between ranks of one host, the first of them too."""
    known = _known_of(group, values.device)
    # The same for every purpose: gloo ends a process that meets another length than its own.
    sent = values.new_zeros(2 + known.room)
    sent[0], sent[1] = len(values), crc32(purpose.encode()) >> 1
    sent[2 : 2 + len(values)] = values[: known.room]
    with explained(f"gather of {purpose}", group):
        gathered = _exchange_directly(sent, group)
        elsewhere = (gathered[:, 1] != sent[1]).nonzero().squeeze(1).tolist()
        if elsewhere:
            raise RuntimeError(f"ranks {elsewhere} are at another point of training")
    lengths: list[int] = gathered[:, 0].tolist()
    known.expect(max(lengths))
    return lengths, gathered[:, 2:]


@dataclass(slots=True)
class _Known:
    """What all ranks of a group know alike: their hosts, and how many values to expect."""

    hosts: list[str]
    room: int = 0

    def expect(self, longest: int) -> None:
        """Make room for a quarter more than went last time: one exchange instead of two."""
        room = 1 << (longest + longest // 4).bit_length()
        is_direct = room <= MAX_ROOM and len(set(self.hosts)) == 1
        self.room = room if is_direct else 0


def hosts(group: ProcessGroup, device: torch.device) -> list[str]:
    """The name of each rank's host; all ranks must call this together, the first time."""
    return _known_of(group, device).hosts


def _known_of(group: ProcessGroup, device: torch.device) -> _Known:
    if group not in _known:
        name = platform.node().encode()[:HOST_NAME_BYTES].ljust(HOST_NAME_BYTES, b"\0")
        codes = torch.frombuffer(bytearray(name), dtype=torch.int32).to(device)
        with explained("gather of host names", group):
            rows = _exchange_directly(codes, group).cpu()
        names = [row.numpy().tobytes().rstrip(b"\0") for row in rows]
        _known[group] = _Known([each.decode(errors="replace") for each in names])
    return _known[group]


def _exchange_directly(
    values: Int32[Tensor, " values"], group: ProcessGroup
) -> Int32[Tensor, "ranks values"]:
    # Straight from each rank to each: of 8 KB in under half the time of gather_equal's ring, which
    # takes a round for each rank, but crosses a link between hosts only once for each message.
    gathered = values.new_empty(group.size() * len(values))
    group.all_to_all_single(gathered, values.repeat(group.size()), [], []).wait()
    return gathered.view(group.size(), len(values))


def gather_equal(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> Int32[Tensor, "ranks values"]:
    """Every rank's `values`, equally many on all; on a GPU nothing waits for it."""
    gathered = values.new_empty(group.size() * len(values))
    with explained(f"gather of {purpose}", group):
        group.all_gather_single(gathered, values).wait()
    return gathered.view(group.size(), len(values))


def gather_text(text: str, group: ProcessGroup, purpose: str, device: torch.device) -> list[str]:
    """Every rank's `text`, in rank order, through memory of `device`."""
    codes = torch.tensor([ord(character) for character in text], dtype=torch.int32, device=device)
    rows = gather(codes, group, purpose)
    return [row.cpu().numpy().tobytes().decode("utf-32-le") for row in rows]
