"""Exchange tensors between the simulated ranks of one group: all with all, or one with one."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from training.distributed.simulated_group.rank_scheduler import RankScheduler
from training.distributed.simulated_group.shared_device import Moment, SharedDevice

Combine: TypeAlias = Callable[[list[list[Tensor]]], list[Tensor]]
"""What all ranks get of the tensors that each has brought, in rank order."""
Deliver: TypeAlias = Callable[[list[Tensor]], None]
Duration: TypeAlias = Callable[[list[list[Tensor]]], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """Timed holds tensors, and from when on they may be read: on the device, and by the clock."""

    tensors: list[Tensor]
    moment: Moment | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation is a collective one: its name, what becomes of the tensors, and its seconds."""

    name: str
    combine: Combine
    duration: Duration


@dataclass(slots=True)
class _Round:
    """_Round is one collective operation of a group, from the first rank to the last."""

    operation: Operation
    inputs: dict[int, Timed] = field(default_factory=dict)
    result: Timed | None = None
    waiting: list[int] = field(default_factory=list)


class Exchange:
    """Exchange combines the tensors that all ranks of one group bring to an operation."""

    def __init__(
        self, scheduler: RankScheduler, device: SharedDevice, ranks: Sequence[int]
    ) -> None:
        self.scheduler = scheduler
        self.device = device
        self.ranks = tuple(ranks)
        self._rounds: dict[int, _Round] = {}
        self._num_started: Counter[int] = Counter()
        self._num_taken: Counter[int] = Counter()
        self._subgroups: dict[tuple[int, ...], Exchange] = {}
        self.mailboxes: defaultdict[tuple[int, int, int], Mailbox] = defaultdict(Mailbox)

    def start(
        self, rank: int, operation: Operation, tensors: Sequence[Tensor], deliver: Deliver
    ) -> dist.Work:
        """Bring this rank's tensors; a rank's n-th operation is the n-th of all others.

        Raises RuntimeError if the others' n-th is another one. `deliver` gets what it yields.
        """
        number = self._num_started[rank]
        found = self._rounds.setdefault(number, _Round(operation))
        if found.operation.name != operation.name:
            raise RuntimeError(
                f"ranks {sorted(found.inputs)} are in {found.operation.name}, {rank} in "
                f"{operation.name}"
            )
        self._num_started[rank] += 1
        # The others combine later, when this rank may have overwritten its values.
        found.inputs[rank] = self.now_timed([each.clone() for each in tensors])
        if len(found.inputs) == len(self.ranks):
            self._combine(found)
        return _RoundWork(self, number, deliver)

    def take(self, number: int) -> list[Tensor]:
        """Wait for the end of a round; return what it yields."""
        found = self._rounds[number]
        if found.result is None:
            found.waiting.append(self.scheduler.number())
            self.scheduler.block(found.operation.name)
        assert found.result is not None
        self._num_taken[number] += 1
        if self._num_taken[number] == len(self.ranks):
            del self._rounds[number], self._num_taken[number]
        self.await_timed(found.result)
        return found.result.tensors

    def is_complete(self, number: int) -> bool:
        """Return whether a round has ended by the calling rank's clock."""
        result = self._rounds[number].result
        return result is not None and result.seconds <= self.scheduler.now()

    def _combine(self, found: _Round) -> None:
        """Combine for all, as the last rank to arrive."""
        inputs = [found.inputs[member] for member in self.ranks]
        for each in inputs:
            self.device.wait_for(each.moment, *each.tensors)
        tensors = [each.tensors for each in inputs]
        end = max(each.seconds for each in inputs) + found.operation.duration(tensors)
        found.result = Timed(found.operation.combine(tensors), self.device.now(), end)
        self.scheduler.unblock(found.waiting, end)

    def now_timed(self, tensors: list[Tensor], seconds: float = 0.0) -> Timed:
        """Return tensors that may be read `seconds` from now."""
        return Timed(tensors, self.device.now(), self.scheduler.now() + seconds)

    def await_timed(self, timed: Timed) -> None:
        """Let the calling rank read the tensors, from their moment on."""
        self.scheduler.reach(timed.seconds)
        self.device.wait_for(timed.moment, *timed.tensors)

    def subgroup(self, ranks: Sequence[int]) -> "Exchange":
        """Return the exchange of some of the ranks, the same object on each of them."""
        exchange = Exchange(self.scheduler, self.device, ranks)
        return self._subgroups.setdefault(tuple(ranks), exchange)


class _RoundWork(dist.Work):
    """_RoundWork waits for a round's end, once or more often, and delivers what it yields."""

    def __init__(self, exchange: Exchange, number: int, deliver: Deliver) -> None:
        super().__init__()
        self._exchange, self._number, self._deliver = exchange, number, deliver
        self._is_delivered = False

    def is_completed(self) -> bool:
        return self._is_delivered or self._exchange.is_complete(self._number)

    def wait(self, *_: object) -> bool:
        if not self._is_delivered:
            self._deliver(self._exchange.take(self._number))
            self._is_delivered = True
        return True


@dataclass(slots=True)
class Mailbox:
    """Mailbox holds messages of one tag from a rank to another, and receives that wait for one."""

    messages: deque[Timed] = field(default_factory=deque)
    receives: "deque[Receive]" = field(default_factory=deque)

    def put(self, message: Timed) -> None:
        """Give a message to the first receive that waits, or keep it for the next."""
        if self.receives:
            self.receives.popleft().accept(message)
        else:
            self.messages.append(message)


class Receive(dist.Work):
    """Receive waits for the next message of its mailbox."""

    def __init__(self, exchange: Exchange, mailbox: Mailbox, into: Tensor, name: str) -> None:
        super().__init__()
        self._exchange, self._into, self._name = exchange, into, name
        self._message: Timed | None = None
        self._waiting: list[int] = []
        if mailbox.messages:
            self._message = mailbox.messages.popleft()
        else:
            mailbox.receives.append(self)

    def accept(self, message: Timed) -> None:
        """Take the message; wake the rank where it waits."""
        self._message = message
        self._exchange.scheduler.unblock(self._waiting, message.seconds)
        self._waiting.clear()

    def is_completed(self) -> bool:
        """Return whether the message has arrived by the calling rank's clock."""
        scheduler = self._exchange.scheduler
        return self._message is not None and self._message.seconds <= scheduler.now()

    def wait(self, *_: object) -> bool:
        """Wait for the message, then read it."""
        if self._message is None:
            self._waiting.append(self._exchange.scheduler.number())
            self._exchange.scheduler.block(self._name)
        assert self._message is not None
        self._exchange.await_timed(self._message)
        self._into.copy_(self._message.tensors[0])
        return True


class Send(dist.Work):
    """Send has left the rank once its bytes are on the link."""

    def __init__(self, exchange: Exchange, seconds: float) -> None:
        super().__init__()
        self._scheduler, self._end = exchange.scheduler, exchange.scheduler.now() + seconds

    def is_completed(self) -> bool:
        """Return whether the bytes are on the link by the calling rank's clock."""
        return self._end <= self._scheduler.now()

    def wait(self, *_: object) -> bool:
        """Wait until they are."""
        self._scheduler.reach(self._end)
        return True
