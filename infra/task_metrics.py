"""Measure tasks: their requests, retries and bytes, their seconds, and their devices' faults.

Each process counts for itself. A task's measures travel to the driver with its result, which adds
them up for the job's record, its last log lines and the report.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from operator import add, attrgetter, sub
from typing import Generic, Literal, TypeVar

FaultKind = Literal["left out", "server lost", "out of memory", "batch failed"]

_MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """DeviceFault says what happened to a device of a host, and on how many tasks.

    A task counts a kind of fault of a device once. The reason is that of the first.
    """

    host: str
    device: str
    kind: FaultKind
    reason: str
    num_tasks: int = 1

    def __str__(self) -> str:
        tasks = "task" if self.num_tasks == 1 else "tasks"
        return (
            f"{self.device} of {self.host}: {self.kind} on {self.num_tasks} {tasks}: {self.reason}"
        )


class FaultRecorder:
    """FaultRecorder holds the faults of a task, from several threads, until they are taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, FaultKind], DeviceFault] = {}

    def add(self, device: str, kind: FaultKind, reason: str) -> None:
        """Note a fault, unless the task has one of this kind and device."""
        line = " ".join(reason.split())[:_MAX_REASON]  # of CUDA's errors, which have several
        fault = DeviceFault(socket.gethostname(), device, kind, line)
        with self._lock:
            self._found.setdefault((device, kind), fault)

    def take(self) -> tuple[DeviceFault, ...]:
        """Return what was noted, and forget it."""
        with self._lock:
            found = tuple(self._found.values())
            self._found.clear()
        return found


FAULTS = FaultRecorder()
"""The faults of this process, which runs one task at a time."""


def summed(faults: Iterable[DeviceFault]) -> list[DeviceFault]:
    """Add up the tasks of each host, device and kind, in their order."""
    totals: dict[tuple[str, str, str], DeviceFault] = {}
    for each in faults:
        key = each.host, each.device, each.kind
        before = totals.get(key)
        num_tasks = each.num_tasks + (before.num_tasks if before else 0)
        totals[key] = replace(before or each, num_tasks=num_tasks)
    return [totals[key] for key in sorted(totals)]


T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

REQUEST_KINDS = ("get", "put", "head", "list")
"""The requests of a store that are counted, and that S3 charges for; a delete is free."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """RequestCounts holds requests by kind, retries included, and the bytes of their bodies.

    `retries` counts the requests that repeated a failed one. On local paths every operation
    counts as one request.
    """

    get: int = 0
    put: int = 0
    head: int = 0
    list: int = 0
    retries: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0

    @property
    def num_requests(self) -> int:
        """Sum the requests of all kinds."""
        return sum(getattr(self, kind) for kind in REQUEST_KINDS)

    def __add__(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(*map(add, _values(self), _values(other)))

    def __sub__(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(*map(sub, _values(self), _values(other)))


# 3 us a sum; dataclasses.astuple, which copies deeply, takes 60, a quarter of a local GET.
_values = attrgetter(*(field.name for field in fields(RequestCounts)))


class RequestCounter:
    """RequestCounter sums counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = RequestCounts()

    def add(self, counts: RequestCounts) -> None:
        """Add `counts` to the total."""
        with self._lock:
            self._total += counts

    def total(self) -> RequestCounts:
        """Return the sum so far."""
        with self._lock:
            return self._total


REQUESTS = RequestCounter()
"""The requests of this process; subtract two totals to count those between them."""


@dataclass(frozen=True, slots=True)
class ObservedFunction(Generic[T, R, S]):
    """ObservedFunction runs a task and lets `see` know the summary of its result at once.

    A plain loop calls it. A cluster runs `run_task` and `summarize` on its workers, and `see` in
    the driver alone. An error of `see` cancels the job and is raised.
    """

    run_task: Callable[[T], R]
    summarize: Callable[[R], S]
    see: Callable[[S], None]

    def __call__(self, task: T) -> R:
        """Run the task and see its summary."""
        result = self.run_task(task)
        self.see(self.summarize(result))
        return result


@dataclass(frozen=True, slots=True)
class Measured(Generic[R]):
    """Measured holds a task's result, its requests, its seconds and its devices' faults."""

    result: R
    requests: RequestCounts
    seconds: float
    faults: tuple[DeviceFault, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredFunction(Generic[T, R]):
    """MeasuredFunction measures a task's function, where a process runs one task at a time.

    `report` gets the result on the worker, before it is sent to the driver.
    """

    function: Callable[[T], R]
    report: Callable[[R], object] | None = None

    def __call__(self, element: T) -> Measured[R]:
        """Run the function on `element`."""
        before, started = REQUESTS.total(), time.monotonic()
        FAULTS.take()  # of an attempt that failed
        result = self.function(element)
        seconds = time.monotonic() - started
        if self.report is not None:
            self.report(result)
        return Measured(result, REQUESTS.total() - before, seconds, FAULTS.take())


class TaskTotals:
    """TaskTotals sums a job's tasks; failed and killed attempts report nothing."""

    def __init__(self) -> None:
        self.requests = RequestCounts()
        self.seconds = 0.0
        self.faults: list[DeviceFault] = []

    def add(self, measured: Measured[R]) -> R:
        """Count one task and return its result."""
        self.requests += measured.requests
        self.seconds += measured.seconds
        self.faults = summed([*self.faults, *measured.faults])
        return measured.result
