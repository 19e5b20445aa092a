"""Exchange tensors between the ranks of a group, never of a default one.

Sums, broadcasts, gathers and all-to-alls return when they are done. A `PendingExchange` runs beside
a rank's computation: tensors that were given belong to it until `wait`. On a GPU `wait` lets the
stream wait, and not the host. A `CommunicationThread` exchanges while the training thread computes.

Where ranks gather unequal numbers of values, the numbers are sent first. Between ranks of one host
the first values travel in the same message (MPI's eager protocol), so that most gathers take one
exchange instead of two. The bytes that a rank gives to exchanges are counted. Ranks may also divide
tasks, and meet while some are at work.
"""

import platform
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Lock
from typing import TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, Work, get_debug_level

from infra.log_lines import progress_bar
from training.distributed.process_group import (
    ProcessGroup,
    explaining_failure,
    is_read_at_once,
    wait_for,
)
from training.distributed.simulated_group import SimulatedGroup


def all_reduce_sum(values: Shaped[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values` by their sum over the ranks, bitwise the same on each rank."""
    count_sent(values.nbytes, group)
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
        group._allgather_base(values, torch.tensor([value])).wait()
    return int(values.max())


def barrier(group: ProcessGroup) -> None:
    """Wait until every rank has called this."""
    maximum(0, group)


def broadcast(values: Shaped[Tensor, "..."], group: ProcessGroup) -> None:
    """Replace `values`, of any type, by those of the group's rank 0."""
    if values.numel() == 0:
        return
    count_sent(values.nbytes if group.rank() == 0 else 0, group)
    # As bytes: gloo knows neither bool nor complex numbers.
    data = values.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    with explaining_failure("broadcast", group):
        wait_for(group.broadcast(data, 0), data, "broadcast")
    values.copy_(data.view(values.dtype).view(values.shape))


def all_to_all(
    parts: Sequence[Shaped[Tensor, " _"]],
    received_sizes: Sequence[int],
    group: ProcessGroup,
    purpose: str,
) -> list[Shaped[Tensor, " _"]]:
    """Give part k to rank k; return what each rank gave, of which rank k gives `received_sizes[k]`.

    Parts may be of any length, or empty; this rank's own part comes back to it.
    """
    assert len(parts) == len(received_sizes) == group.size()
    values, output = torch.cat(list(parts)), parts[0].new_empty(sum(received_sizes))
    count_sent(values.nbytes - parts[group.rank()].nbytes, group)
    sizes, exchange = [len(part) for part in parts], f"all-to-all of {purpose}"
    with explaining_failure(exchange, group):
        work = group.alltoall_base(output, values, list(received_sizes), sizes)
        wait_for(work, output, exchange)
    return list(output.split_with_sizes(list(received_sizes)))


MAX_EAGER_VALUES = 2**16
"""Values that may travel along with their number: from 1 MB on a ring is faster than copies."""

HOST_NAME_BYTES = 256

_gather_states: "WeakKeyDictionary[ProcessGroup, _GatherState]" = WeakKeyDictionary()


def gather_ragged(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> list[Int32[Tensor, " values_of_rank"]]:
    """Return every rank's `values`, in rank order; each rank may have another number, or none.

    Raises CollectiveError if a rank gathers for another purpose, so that values of one exchange are
    never mistaken for those of the next.
    """
    count_sent(values.nbytes, group)
    lengths, eager_rows = _gather_eagerly(values, group, purpose)
    longest = max(lengths)
    if longest <= eager_rows.shape[1]:
        rows = eager_rows
    else:
        # gloo's ragged all-gather fails, so all ranks pad to the longest.
        padded = values.new_zeros(longest)
        padded[: len(values)] = values
        rows = _gather_rows(padded, group, purpose)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _gather_eagerly(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> tuple[list[int], Int32[Tensor, "ranks eager_values"]]:
    """Return the ranks' numbers of values and, between ranks of one host, their first values."""
    state = _state_of(group, values.device)
    # The same length for every purpose: gloo aborts a process that receives another length.
    sent = values.new_zeros(2 + state.num_eager)
    sent[0], sent[1] = len(values), crc32(purpose.encode()) >> 1
    sent[2 : 2 + len(values)] = values[: state.num_eager]
    with explaining_failure(f"gather of {purpose}", group):
        gathered = _gather_directly(sent, group, purpose)
        elsewhere = (gathered[:, 1] != sent[1]).nonzero().squeeze(1).tolist()
        if elsewhere:
            raise RuntimeError(f"ranks {elsewhere} are at another point of training")
    lengths: list[int] = gathered[:, 0].tolist()
    state.update(max(lengths))
    return lengths, gathered[:, 2:]


@dataclass(slots=True)
class _GatherState:
    """_GatherState holds the ranks' hosts and the number of eager values, equal on all ranks."""

    host_names: list[str]
    num_eager: int = 0

    def update(self, longest: int) -> None:
        """Allow a quarter more values than the longest rank had last time."""
        num_eager = 1 << (longest + longest // 4).bit_length()
        is_direct = num_eager <= MAX_EAGER_VALUES and len(set(self.host_names)) == 1
        self.num_eager = num_eager if is_direct else 0


def gather_host_names(group: ProcessGroup, device: torch.device) -> list[str]:
    """Return the name of each rank's host; the first call is an exchange of all ranks."""
    return _state_of(group, device).host_names


def _state_of(group: ProcessGroup, device: torch.device) -> _GatherState:
    if group not in _gather_states:
        name = platform.node().encode()[:HOST_NAME_BYTES].ljust(HOST_NAME_BYTES, b"\0")
        codes = torch.frombuffer(bytearray(name), dtype=torch.int32).to(device)
        with explaining_failure("gather of host names", group):
            rows = _gather_directly(codes, group, "host names").cpu()
        names = [row.numpy().tobytes().rstrip(b"\0") for row in rows]
        _gather_states[group] = _GatherState([each.decode(errors="replace") for each in names])
    return _gather_states[group]


def _gather_directly(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> Int32[Tensor, "ranks values"]:
    # For 8 KB this takes less than half the time of gather_equal's ring, which needs a round for
    # each rank. The ring sends each message only once over a link between hosts.
    gathered = values.new_empty(group.size() * len(values))
    work = group.alltoall_base(gathered, values.repeat(group.size()), [], [])
    wait_for(work, values, f"gather of {purpose}")
    return gathered.view(group.size(), len(values))


def gather_equal(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> Int32[Tensor, "ranks values"]:
    """Return every rank's `values`, equally many on all; the host does not wait for a GPU."""
    count_sent(values.nbytes, group)
    return _gather_rows(values, group, purpose)


def _gather_rows(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> Int32[Tensor, "ranks values"]:
    gathered = values.new_empty(group.size() * len(values))
    with explaining_failure(f"gather of {purpose}", group):
        wait_for(group._allgather_base(gathered, values), values, f"gather of {purpose}")
    return gathered.view(group.size(), len(values))


class Arrival:
    """Arrival copies values to the host, which works on meanwhile."""

    def __init__(self, values: Shaped[Tensor, "..."]) -> None:
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._values.copy_(values.contiguous(), non_blocking=True)
        self._event = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def values(self) -> Shaped[Tensor, "..."]:
        """Wait for them: the device is then one step behind, at most, and has work to do."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def gather_text(text: str, group: ProcessGroup, purpose: str, device: torch.device) -> list[str]:
    """Return every rank's `text`, in rank order, exchanged through memory of `device`."""
    codes = torch.tensor([ord(character) for character in text], dtype=torch.int32, device=device)
    rows = gather_ragged(codes, group, purpose)
    return [row.cpu().numpy().tobytes().decode("utf-32-le") for row in rows]


T = TypeVar("T")
R = TypeVar("R")

SLICE_S = 0.2
"""Ranks meet so often; an exchange's time limit, a second at least, bounds the wait for one."""


def run_own_tasks(
    tasks: Sequence[T],
    count_losses: Callable[[T], int],
    check_losses: Callable[[int], None],
    group: ProcessGroup,
    *,
    description: str,
) -> None:
    """Run every size-th of the tasks on this rank; return once all ranks have run theirs.

    Rank 0 shows how many tasks are done, under `description`. `check_losses` sees on every rank
    what all tasks so far have lost, and may raise to end them. Raises a task's own error, and
    CollectiveError where another rank is dead.
    """
    todo = list(tasks[group.rank() :: group.size()])
    current: Future[int] | None = None
    num_lost, num_left = 0, len(tasks)
    with progress_bar(description=description, total=num_left, disable=group.rank() > 0) as bar:
        while num_left:
            if current is None and todo:
                current = _started(partial(count_losses, todo.pop(0)), "rank task")
            # A rank without a task waits in the exchange, for a slice of the others' time.
            if current is not None and wait([current], timeout=SLICE_S).done:
                num_lost += current.result()
                current = None
            own_left = len(todo) + (current is not None)
            sums = torch.tensor([own_left, num_lost], dtype=torch.int64)
            all_reduce_sum(sums, group)
            before, (num_left, lost_by_all) = num_left, sums.tolist()
            bar.update(before - num_left)
            check_losses(lost_by_all)


def _started(function: Callable[[], R], name: str) -> Future[R]:
    """Run a function in a daemon thread."""
    future: Future[R] = Future()
    threading.Thread(target=_run_for, args=(future, function), name=name, daemon=True).start()
    return future


def _run_for(future: Future[R], function: Callable[[], R]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # `result` raises it in the thread that asks for it
        future.set_exception(error)


_bytes_sent: "WeakKeyDictionary[ProcessGroup, int]" = WeakKeyDictionary()
_lock = Lock()
"""A rank may exchange in a thread beside its steps; a sum that both change at once loses bytes."""


def count_sent(num_bytes: int, group: ProcessGroup) -> None:
    """Count a message once, however many ranks receive it; a rank alone sends nothing."""
    if group.size() > 1:
        with _lock:
            _bytes_sent[group] = _bytes_sent.get(group, 0) + num_bytes


class Traffic:
    """Traffic counts the bytes that are sent in some parts of a program, each message once."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def counting(self, groups: Collection[ProcessGroup]) -> Iterator[None]:
        """Count what is sent in any of `groups` within."""
        before = sum(_bytes_sent.get(group, 0) for group in groups)
        yield
        self.add(sum(_bytes_sent.get(group, 0) for group in groups) - before)

    def add(self, num_bytes: int) -> None:
        """Add what was sent in a part that no `counting` sees."""
        with _lock:
            self.num_bytes += num_bytes


_NO_LIMIT = timedelta(days=3650)
_tags = count(1)
_abandoned: list["PendingExchange"] = []


def new_tag(group: ProcessGroup) -> int:
    """Return a tag that no exchange of the group has had; all ranks call this together."""
    tag = torch.tensor([next(_tags)])
    broadcast(tag, group)
    return int(tag)


class PendingExchange:
    """PendingExchange is an exchange that has started; `wait` returns its result."""

    def __init__(
        self,
        start: Callable[[], Work],
        values: Shaped[Tensor, "..."],
        group: ProcessGroup,
        exchange: str,
    ) -> None:
        self._values, self._group, self._exchange = values, group, exchange
        with explaining_failure(exchange, group):
            self._work = start()

    def is_done(self) -> bool:
        """Return whether a receive's `wait` would return, or raise, at once."""
        return self._work.is_completed()

    def wait(self) -> Shaped[Tensor, "..."]:
        """Wait for the end; return the values. Raises CollectiveError, as `collectives` do."""
        with explaining_failure(self._exchange, self._group):
            wait_for(self._work, self._values, self._exchange)
        return self._values

    def wait_without_limit(self) -> Shaped[Tensor, "..."]:
        """Wait for as long as the other rank lives; `wait` ends at the group's time limit."""
        with explaining_failure(self._exchange, self._group):
            self._work.wait(_NO_LIMIT)
        return self._values

    def abandon(self) -> None:
        """Keep the memory that an exchange may still use when, after an error, nobody waits for it.

        A message for memory that is gone stops gloo's connection, of all exchanges of two ranks.
        """
        _abandoned.append(self)


class PendingGather:
    """PendingGather is a pending gather of equally many values, while this rank works on."""

    def __init__(self, values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str) -> None:
        self._shape = group.size(), len(values)
        gathered = values.new_empty(group.size() * len(values))
        self._pending = PendingExchange(
            lambda: group._allgather_base(gathered, values), gathered, group, f"gather of {purpose}"
        )
        # A GPU's stream waits for the others here, and the host when it reads.
        is_late = not is_read_at_once(values.device)
        self._arrival = Arrival(self._pending.wait()) if is_late else None

    def rows(self) -> Int32[Tensor, "ranks values"]:
        """Wait for every rank's values; return them on the CPU."""
        found = self._pending.wait() if self._arrival is None else self._arrival.values()
        return found.view(self._shape)


def start_sum(values: Shaped[Tensor, "..."], group: ProcessGroup, purpose: str) -> PendingExchange:
    """Start to replace `values` by their sum over the ranks, bitwise the same on each rank."""
    count_sent(values.nbytes, group)
    return PendingExchange(lambda: group.allreduce(values), values, group, f"sum of {purpose}")


def start_send(
    values: Shaped[Tensor, "..."], receiver: int, group: ProcessGroup, tag: int
) -> PendingExchange:
    """Start to send `values` to a rank's receive of the same tag and size.

    Messages of a tag from one rank to another arrive in order.
    """
    count_sent(values.nbytes, group)
    purpose = f"send to rank {receiver}"
    return PendingExchange(lambda: group.send([values], receiver, tag), values, group, purpose)


def start_receive(
    into: Shaped[Tensor, "..."], sender: int, group: ProcessGroup, tag: int
) -> PendingExchange:
    """Start to receive what a rank sends under the same tag, in the memory of `into`."""

    def start() -> Work:
        work = group.recv([into], sender, tag)
        is_polled = isinstance(group, SimulatedGroup) or not is_read_at_once(into.device)
        return work if is_polled else _WatchedWork(work)

    return PendingExchange(start, into, group, f"receive from rank {sender}")


class _WatchedWork(Work):
    """_WatchedWork knows when gloo is done: its own `is_completed` is False until `wait`.

    The first question starts a thread that waits.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._watch: Future[bool] | None = None

    def is_completed(self) -> bool:
        if self._watch is None:
            self._watch = _started(self._work.wait, "receive")
        return self._watch.done()

    def wait(self, *limit: timedelta) -> bool:
        return self._work.wait(*limit) if self._watch is None else self._watch.result()


class CommunicationThread:
    """CommunicationThread runs `work` in a thread; for a simulated rank, in its virtual time.

    Its exchanges use tags or a group that no other thread uses. An error ends it, and is raised by
    `check` and `join` in the training thread. It does not keep alive a process that ends.
    """

    def __init__(self, work: Callable[[], None], group: ProcessGroup, purpose: str) -> None:
        self._ended: Future[None]
        self._wait: Callable[[], object]
        if isinstance(group, SimulatedGroup):
            self._ended = Future()
            self._wait = group.start_thread(partial(_run_for, self._ended, work))
        else:
            self._ended = _started(work, purpose)
            self._wait = partial(wait, [self._ended])

    def check(self) -> None:
        """Raise the error that has ended the thread, if any."""
        if self._ended.done():
            self._ended.result()

    def join(self) -> None:
        """Wait until the thread ends; raise the error that ended it, if any."""
        self._wait()
        self.check()


def check_exchanges_beside(group: ProcessGroup) -> None:
    """Raise ValueError if torch numbers exchanges: those of threads have no fixed order."""
    is_numbered = get_debug_level() == DebugLevel.DETAIL
    if is_numbered and group.size() > 1 and not isinstance(group, SimulatedGroup):
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL ends trainings whose exchanges run beside the "
            "gradients, AdPsgd and OneBit with double_buffering: set it to INFO or OFF"
        )
