"""Run exchanges beside a rank's computation: sums, all-to-alls, sends and receives.

Each function starts one, and its `wait` ends it. Tensors that were given belong to the exchange
until then. On a GPU `wait` lets the stream wait, and not the host. A `CommunicationThread`
exchanges with other ranks while the training thread computes.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count

import torch
from jaxtyping import Shaped
from torch import Tensor

from training.distributed import collectives
from training.distributed.collectives import count_sent, sum_wire_bytes
from training.distributed.process_group import (
    ProcessGroup,
    Work,
    are_exchanges_numbered,
    explaining_failure,
    is_read_at_once,
    wait_for,
)
from training.distributed.simulated_group import SimulatedGroup

_NO_LIMIT = timedelta(days=3650)
_tags = count(1)
_abandoned: list["PendingExchange"] = []


def new_tag(group: ProcessGroup) -> int:
    """Return a tag that no exchange of the group has had; all ranks call this together."""
    tag = torch.tensor([next(_tags)])
    collectives.broadcast(tag, group)
    return int(tag)


class PendingExchange:
    """PendingExchange is under way; `values` are its result after `wait`."""

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
        """Return whether `wait` returns at once, be it with an error."""
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
        """Keep the memory that an exchange may still use, after an error, for which none waits.

        A message for memory that is gone stops gloo's connection, of all exchanges of two ranks.
        """
        _abandoned.append(self)


def start_sum(values: Shaped[Tensor, "..."], group: ProcessGroup, purpose: str) -> PendingExchange:
    """Start to replace `values` by their sum over the ranks, bitwise the same on each rank."""
    count_sent(values.nbytes, group, sum_wire_bytes(values.nbytes, group.size()))

    def start() -> Work:
        return _polled(group.allreduce(values), values, group)

    return PendingExchange(start, values, group, f"sum of {purpose}")


def start_send(
    values: Shaped[Tensor, "..."], receiver: int, group: ProcessGroup, tag: int
) -> PendingExchange:
    """Start to send `values` to a rank's receive of the same tag and size.

    Messages of a tag from one rank to another arrive in order.
    """
    count_sent(values.nbytes, group, values.nbytes)
    purpose = f"send to rank {receiver}"
    return PendingExchange(lambda: group.send([values], receiver, tag), values, group, purpose)


def start_receive(
    into: Shaped[Tensor, "..."], sender: int, group: ProcessGroup, tag: int
) -> PendingExchange:
    """Start to receive what a rank sends under the same tag, in the memory of `into`."""

    def start() -> Work:
        return _polled(group.recv([into], sender, tag), into, group)

    return PendingExchange(start, into, group, f"receive from rank {sender}")


class PendingParts:
    """PendingParts is an all-to-all under way."""

    def __init__(self, pending: PendingExchange, sizes: Sequence[int]) -> None:
        self._pending, self._sizes = pending, list(sizes)

    def is_done(self) -> bool:
        """Return whether `wait` returns at once, be it with an error."""
        return self._pending.is_done()

    def wait(self) -> list[Shaped[Tensor, " _"]]:
        """Wait for the part of each rank, in rank order; raises CollectiveError."""
        return list(self._pending.wait().split_with_sizes(self._sizes))


def start_all_to_all(
    parts: Sequence[Shaped[Tensor, " _"]],
    received_sizes: Sequence[int],
    group: ProcessGroup,
    purpose: str,
) -> PendingParts:
    """Start to give part k to rank k; `received_sizes[k]` values come from rank k.

    Parts may be of any length, or empty; this rank's own part comes back to it.
    """
    for name, sizes in (("parts", parts), ("received_sizes", received_sizes)):
        if len(sizes) != group.size():
            raise ValueError(f"{len(sizes)} {name}: need one for each of {group.size()} ranks")
    sizes = [len(part) for part in parts]
    values, output = torch.cat(list(parts)), parts[0].new_empty(sum(received_sizes))
    elsewhere = values.nbytes - parts[group.rank()].nbytes
    count_sent(elsewhere, group, elsewhere)

    def start() -> Work:
        return group.all_to_all_single(output, values, list(received_sizes), sizes)

    exchange = f"all-to-all of {purpose}"
    return PendingParts(PendingExchange(start, output, group, exchange), received_sizes)


def _polled(work: Work, values: Shaped[Tensor, "..."], group: ProcessGroup) -> Work:
    """Return the work of an exchange that may be asked whether it is done."""
    is_polled = isinstance(group, SimulatedGroup) or not is_read_at_once(values.device)
    return work if is_polled else _WatchedWork(work)


class _WatchedWork(Work):
    """_WatchedWork knows when gloo is done: its own `is_completed` is False until `wait`.

    The first question starts a thread that waits.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="receive", daemon=True)
            self._thread.start()
        return not self._thread.is_alive()

    def wait(self, *limit: timedelta) -> bool:
        if self._thread is None:
            return self._work.wait(*limit)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def _watch(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error


class CommunicationThread:
    """CommunicationThread runs `work` from now on; of a simulated rank, in its virtual time.

    Its exchanges use tags or a group that no other thread uses. An error ends it, and is raised by
    `check` and `join` in the training thread. It does not keep alive a process that ends.
    """

    def __init__(self, work: Callable[[], None], group: ProcessGroup, purpose: str) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._join: Callable[[], None]
        if isinstance(group, SimulatedGroup):
            self._join = group.start_thread(self._run)
        else:
            thread = threading.Thread(target=self._run, name=purpose, daemon=True)
            thread.start()
            self._join = thread.join

    def check(self) -> None:
        """Raise the error that has ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait until the thread ends; raise the error that ended it, if any."""
        self._join()
        self.check()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # `check` raises it in the training thread
            self._error = error


def check_exchanges_beside(group: ProcessGroup) -> None:
    """Raise ValueError where torch numbers exchanges: those of threads follow no order."""
    if are_exchanges_numbered() and group.size() > 1 and not isinstance(group, SimulatedGroup):
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL ends trainings whose exchanges run beside the "
            "gradients, AdPsgd and OneBit with double_buffering: set it to INFO or OFF"
        )
