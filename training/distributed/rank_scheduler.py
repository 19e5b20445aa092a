"""Run the threads of simulated ranks one at a time, in the order of their virtual time.

They share a CPU, or a GPU with a CUDA stream for each rank. One rank's Python runs at a time. On a
GPU it only queues kernels, and those of several ranks run side by side: an LSTM's products over one
minibatch leave most of a large GPU idle.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Moment(Protocol):
    """Moment is a point in what a rank has queued: an event of its stream."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let what is queued on `stream` from now on begin after it."""


class SharedDevice:
    """SharedDevice is a CPU: work is done when it is called, so turns order it."""

    queues_work = False
    """Whether calls return before their work is done."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work within as one rank, in a thread of its own."""
        yield

    def now(self) -> Moment | None:
        """Return the moment after all that this thread has called so far."""
        return None

    def wait_for(self, moment: Moment | None, *tensors: Tensor) -> None:
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

    def wait_for(self, moment: Moment | None, *tensors: Tensor) -> None:
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
