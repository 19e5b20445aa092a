"""Simulate ranks inside one process: threads that take turns and exchange tensors.

They share a CPU, or a GPU with a CUDA stream for each rank. One rank's Python runs at a time, in
the order of virtual time, so results do not depend on the threads' scheduling, and each rank has
its own torch random state. On a GPU a rank only queues kernels, and those of several ranks run side
by side: an LSTM's products over one minibatch leave most of a large GPU idle.

Trainers see a `torch.distributed.ProcessGroup`, as with real ranks. Sums have the order of gloo's
ring, so that simulated ranks get the bits of real ones, and a `SimulatedLink` says how long each
exchange takes in virtual time.
"""

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Annotated, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from infra.settings import Range, check_ranges


@runtime_checkable
class StreamEvent(Protocol):
    """StreamEvent is a point in what a rank has queued on a GPU, such as `torch.cuda.Event`."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let what is queued on `stream` from now on begin after it."""


Moment: TypeAlias = StreamEvent | None
"""An event of a rank's stream; None on a CPU, where nothing is queued."""


class SharedDevice:
    """SharedDevice is a CPU: work is done when it is called, so turns order it."""

    queues_work = False
    """Whether calls return before their work is done."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work within as one rank, in a thread of its own."""
        yield

    def now(self) -> Moment:
        """Return the moment after all that this thread has called so far."""
        return None

    def wait_for(self, moment: Moment, *tensors: Tensor) -> None:
        """Let this thread's later work begin after `moment`; it reads `tensors` of another rank."""

    def random_state(self) -> list[Tensor]:
        """Return the states of torch's generators, which all ranks share."""
        return [torch.get_rng_state()]

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        """Restore `random_state()`."""
        torch.set_rng_state(states[0])


class SharedGpu(SharedDevice):
    """SharedGpu has a CUDA stream for each rank, and events where ranks read of each other.

    No host waits. torch deals 32 streams in turn, so that of more ranks two may share one, which
    orders more than is necessary.
    """

    queues_work = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def working(self) -> Iterator[None]:
        """Queue within on a stream of its own, which remains the thread's while others run."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield

    def now(self) -> Moment:
        """Record an event on this thread's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_for(self, moment: Moment, *tensors: Tensor) -> None:
        """Let this thread's stream wait for the event."""
        stream = torch.cuda.current_stream(self._device)
        if moment is not None:
            moment.wait(stream)
        for tensor in tensors:
            # Else the memory of a tensor that its own rank drops could be written meanwhile.
            if tensor.device.type == self._device.type:
                tensor.record_stream(stream)

    def random_state(self) -> list[Tensor]:
        """Return the states of the CPU's generator and of the device's, without waiting for it."""
        return [*super().random_state(), torch.cuda.get_rng_state(self._device)]

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        """Restore `random_state()`."""
        super().set_random_state(states)
        torch.cuda.set_rng_state(states[1], self._device)


def shared_device(device: torch.device) -> SharedDevice:
    """Return the way in which simulated ranks share `device`."""
    return SharedGpu(device) if device.type == "cuda" else SharedDevice()


class DeadlockError(RuntimeError):
    """DeadlockError reports that all unfinished ranks wait for others, and each one's exchange."""


class RankScheduler:
    """RankScheduler lets one thread run: the earliest by its clock, of those that are ready.

    The others are ready, or blocked in an exchange. Threads 0, 1, ... are the ranks; threads that
    a rank starts beside its own follow. Clocks move in `reach` and `unblock` alone, so ranks whose
    work takes no time take turns. What a thread finds has therefore happened before its own time.
    """

    def __init__(self, num_ranks: int, device: SharedDevice) -> None:
        self._device = device
        self._wakes: list[threading.Semaphore] = []
        self._clocks: list[float] = []
        # A turn for each entry: of threads at one time the first to become ready runs first.
        self._turns = count()
        self._ready: list[tuple[float, int, int]] = []
        self._blocked: dict[int, str] = {}
        self._deadlock: DeadlockError | None = None
        self._current = threading.local()
        self._started: list[threading.Thread] = []
        self._ended: set[int] = set()
        for _ in range(num_ranks):
            self._add_thread(0.0)

    def enter(self, number: int) -> None:
        """Make the calling thread the one of this number; sleep until it is scheduled."""
        self._current.number = number
        self._sleep(number)

    def now(self) -> float:
        """Return the calling thread's clock, in virtual seconds."""
        return self._clocks[self.number()]

    def reach(self, moment: int | float) -> None:
        """Move the calling thread's clock up to `moment`; threads that are earlier run first."""
        number: int = self._current.number
        self._clocks[number] = max(self._clocks[number], moment)
        if self._ready and self._ready[0][0] < self._clocks[number]:
            self._make_ready(number)
            self._run_others()

    def block(self, operation: str) -> None:
        """Run other threads until what the calling one waits for is complete."""
        self._blocked[self._current.number] = operation
        self._run_others()

    def unblock(self, numbers: Sequence[int], moment: int | float) -> None:
        """Make blocked threads ready at `moment`, at which their exchange is complete."""
        for number in numbers:
            del self._blocked[number]
            self._clocks[number] = max(self._clocks[number], moment)
            self._make_ready(number)

    def number(self) -> int:
        """Return the calling thread's number."""
        found: int = self._current.number
        return found

    def pass_turn(self) -> None:
        """Run the other threads that are ready, where this one's work is under way meanwhile."""
        # A rank that kept its turn for a block of steps would fill the GPU's queue by itself.
        if self._device.queues_work and self._ready:
            self._make_ready(self._current.number)
            self._run_others()

    def start_thread(self, work: Callable[[], None]) -> Callable[[], None]:
        """Start a thread of the calling one's rank, which begins at its time; return its join."""
        number = self._add_thread(self.now())
        waiting: list[int] = []
        thread = threading.Thread(target=self._run_started, args=(number, work, waiting))
        self._started.append(thread)
        thread.start()

        def join() -> None:
            if number in self._ended:
                self.reach(self._clocks[number])
            else:
                waiting.append(self.number())
                self.block("the end of a thread beside it")

        return join

    def _run_started(self, number: int, work: Callable[[], None], waiting: list[int]) -> None:
        try:
            self.enter(number)
            with self._device.working():
                work()
        except DeadlockError:
            pass  # its rank has ended, or raises the same
        finally:
            self._ended.add(number)
            if self._deadlock is None:
                self.unblock(waiting, self._clocks[number])
                self.run_next()

    def join_started(self) -> None:
        """Wait for the threads that ranks have started; those that still wait end with an error."""
        for thread in self._started:
            thread.join()

    def run_next(self) -> None:
        """Wake the earliest ready thread; if all are blocked, wake them to raise an error."""
        if self._ready:
            self._wakes[heappop(self._ready)[2]].release()
        # One thread runs at a time, so none ready and some blocked is a certain deadlock.
        elif self._blocked and self._deadlock is None:
            where = ", ".join(
                f"{self._name(number)} in {what}" for number, what in self._blocked.items()
            )
            self._deadlock = DeadlockError(
                f"the ranks that have not finished wait for others: {where}. All ranks must take "
                "the same number of steps"
            )
            for number in self._blocked:
                self._wakes[number].release()

    def _add_thread(self, moment: float) -> int:
        number = len(self._wakes)
        self._wakes.append(threading.Semaphore(0))
        self._clocks.append(moment)
        self._make_ready(number)
        return number

    def _make_ready(self, number: int) -> None:
        heappush(self._ready, (self._clocks[number], next(self._turns), number))

    def _run_others(self) -> None:
        # Other ranks change torch's random state, which threads share.
        random_state = self._device.random_state()
        self.run_next()
        self._sleep(self._current.number)
        self._device.set_random_state(random_state)

    def _sleep(self, number: int) -> None:
        self._wakes[number].acquire()
        if self._deadlock is not None:
            raise self._deadlock

    def _name(self, number: int) -> str:
        num_ranks = len(self._wakes) - len(self._started)
        return f"rank {number}" if number < num_ranks else "a thread beside a rank"


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """SimulatedLink is the link of each rank: every message takes `latency_s`, and its bytes.

    Exchanges under way at one time do not share it. The default takes no time.
    """

    latency_s: Annotated[int | float, Range(0, 1e9)] = 0.0
    bytes_per_s: Annotated[int | float, Range(1e-9, math.inf)] = math.inf

    __post_init__ = check_ranges

    def message_s(self, num_bytes: int | float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


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


Combine: TypeAlias = Callable[[list[list[Tensor]]], list[Tensor]]
"""What all ranks get of the tensors that each has brought, in rank order."""
Deliver: TypeAlias = Callable[[list[Tensor]], None]
Duration: TypeAlias = Callable[[list[list[Tensor]]], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """Timed holds tensors, and from when on they may be read: on the device, and by the clock."""

    tensors: list[Tensor]
    moment: Moment
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

    def wait(self, *_: object) -> bool:
        """Wait until the bytes are on the link."""
        self._scheduler.reach(self._end)
        return True


Result = TypeVar("Result")
CPU = SharedDevice()
AT_ONCE = SimulatedLink()


class SimulatedGroup(dist.ProcessGroup):
    """SimulatedGroup is a process group of ranks inside one process, for `collectives`.

    Each rank has a clock of virtual time, which `advance` moves, and exchanges over `link`.
    """

    def __init__(self, world_rank: int, exchange: Exchange, link: SimulatedLink) -> None:
        super().__init__(exchange.ranks.index(world_rank), len(exchange.ranks))  # type: ignore[call-arg]
        self._world_rank = world_rank
        self._exchange = exchange
        self._link = link

    def subgroup(self, ranks: Sequence[int]) -> "SimulatedGroup | None":
        """Make the group of some of this group's ranks; return None on the other ranks."""
        members = [self._exchange.ranks[rank] for rank in ranks]
        if self._world_rank not in members:
            return None
        return SimulatedGroup(self._world_rank, self._exchange.subgroup(members), self._link)

    def pass_turn(self) -> None:
        """Let other ranks queue their work, where this one's runs on a device meanwhile."""
        self._exchange.scheduler.pass_turn()

    def advance(self, seconds: int | float) -> None:
        """Spend virtual seconds at work; ranks that are earlier than that run first."""
        if seconds < 0:
            raise ValueError(f"{seconds} seconds of work: need at least 0")
        self._exchange.scheduler.reach(self.now() + seconds)

    def now(self) -> float:
        """Return this rank's virtual time, in seconds."""
        return self._exchange.scheduler.now()

    def start_thread(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` in a thread beside this rank's, from its time on; return what waits for it."""
        return self._exchange.scheduler.start_thread(work)

    # torch passes options to these operations; `collectives` and its neighbours use none.
    def _allgather_base(  # type: ignore[override]
        self, output: Shaped[Tensor, " all_values"], values: Shaped[Tensor, " values"]
    ) -> dist.Work:
        """Concatenate every rank's `values`, equally many."""
        operation = Operation(
            f"an all-gather of {len(values)} values",
            lambda inputs: [torch.cat([tensor for tensors in inputs for tensor in tensors])],
            # A ring: L - 1 messages of one rank's values.
            lambda inputs: (len(inputs) - 1) * self._link.message_s(values.nbytes),
        )
        return self._start(operation, [values], output)

    def alltoall_base(  # type: ignore[override]
        self,
        output: Shaped[Tensor, " all_parts"],
        values: Shaped[Tensor, " parts"],
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> dist.Work:
        """Give each rank its part of every rank's `values`; without sizes parts are equally long.

        On `wait`, RuntimeError where a part is not as long as its receiver expects.
        """
        sizes = list(input_sizes) or [len(values) // self.size()] * self.size()
        expected = list(output_sizes) or [len(output) // self.size()] * self.size()
        name = "an uneven all-to-all" if input_sizes else f"an all-to-all of {len(values)} values"
        operation = Operation(
            name, lambda inputs: [part for parts in inputs for part in parts], self._direct_s
        )

        def deliver(parts: list[Tensor]) -> None:
            own = parts[self.rank() :: self.size()]
            if [len(part) for part in own] != expected:
                found = [len(part) for part in own]
                raise RuntimeError(f"parts of {found} values for a rank that expects {expected}")
            output.copy_(torch.cat(own))

        tensors = list(values.split_with_sizes(sizes))
        return self._exchange.start(self._world_rank, operation, tensors, deliver)

    def allreduce(self, values: Shaped[Tensor, "..."]) -> dist.Work:  # type: ignore[override]
        """Replace `values` by their sum over the ranks, added in the order of gloo's ring."""
        operation = Operation(
            f"a sum of {values.numel()} values",
            lambda inputs: [ring_sum([tensors[0] for tensors in inputs])],
            # A ring: 2 (L - 1) messages of an L-th.
            lambda inputs: (
                2 * (len(inputs) - 1) * self._link.message_s(values.nbytes / len(inputs))
            ),
        )
        return self._start(operation, [values], values)

    def broadcast(  # type: ignore[override]
        self, values: Shaped[Tensor, " values"], root: int
    ) -> dist.Work:
        """Replace `values` by those of rank `root`."""
        operation = Operation(
            "a broadcast",
            lambda inputs: inputs[root],
            # A binomial tree: its messages follow one another.
            lambda inputs: (len(inputs) - 1).bit_length() * self._link.message_s(values.nbytes),
        )
        return self._start(operation, [values], values)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> dist.Work:
        """Send a tensor to a rank, which may receive it later."""
        (values,) = tensors
        message = self._exchange.now_timed([values.clone()], self._link.message_s(values.nbytes))
        self._exchange.mailboxes[self.rank(), receiver, tag].put(message)
        return Send(self._exchange, values.nbytes / self._link.bytes_per_s)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> dist.Work:
        """Receive the sender's next tensor of this tag into the one given."""
        (into,) = tensors
        mailbox = self._exchange.mailboxes[sender, self.rank(), tag]
        return Receive(self._exchange, mailbox, into, f"a receive from rank {sender}")

    def _start(self, operation: Operation, tensors: list[Tensor], output: Tensor) -> dist.Work:
        def deliver(results: list[Tensor]) -> None:
            output.copy_(results[0])

        return self._exchange.start(self._world_rank, operation, tensors, deliver)

    def _direct_s(self, inputs: list[list[Tensor]]) -> float:
        """Return the seconds of messages that each rank sends to each other's link at once."""
        if len(inputs) == 1:
            return 0.0
        own = [
            sum(part.nbytes for part in parts) - parts[rank].nbytes
            for rank, parts in enumerate(inputs)
        ]
        return self._link.message_s(max(own))


def simulate_ranks(
    num_ranks: int,
    scenario: Callable[..., Result],
    *arguments: object,
    device: SharedDevice = CPU,
    link: SimulatedLink = AT_ONCE,
) -> list[Result]:
    """Run `scenario(group, *arguments)` on every rank; return the results in rank order.

    Ranks exchange over `link` in virtual time. On a `SharedGpu` each rank queues its work on a
    stream of its own: it begins after what the caller has queued, and the caller's next work after
    it. An error on one rank ends the ranks that wait for it, and is raised here. Raises
    DeadlockError if ranks wait for others that have finished.
    """
    scheduler = RankScheduler(num_ranks, device)
    world = Exchange(scheduler, device, range(num_ranks))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    ends: list[Moment] = []
    random_state, start = device.random_state(), device.now()

    def run_rank(rank: int) -> None:
        try:
            scheduler.enter(rank)
            with device.working():
                device.wait_for(start)
                device.set_random_state(random_state)
                results[rank] = scenario(SimulatedGroup(rank, world, link), *arguments)
                ends.append(device.now())
        except BaseException as error:
            errors.append(error)
        finally:
            scheduler.run_next()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    scheduler.run_next()
    for thread in threads:
        thread.join()
    scheduler.join_started()
    for end in ends:
        device.wait_for(end)
    device.set_random_state(random_state)
    if errors:
        # The first error is the cause; ranks that waited for this one fail after it.
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]
