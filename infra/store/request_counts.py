"""Count a process's requests, retries and bytes, and its tasks' seconds and device faults."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import Generic, TypeVar

from infra.device_faults import FAULTS, DeviceFault, summed

T = TypeVar("T")
R = TypeVar("R")


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
        return self.get + self.put + self.head + self.list

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
class Measured(Generic[R]):
    """Measured holds a task's result, its requests, its seconds and its devices' faults."""

    result: R
    requests: RequestCounts
    seconds: float
    faults: tuple[DeviceFault, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredFunction(Generic[T, R]):
    """MeasuredFunction measures a task's function, where a process runs one task at a time."""

    function: Callable[[T], R]

    def __call__(self, element: T) -> Measured[R]:
        """Run the function on `element`."""
        before, started = REQUESTS.total(), time.monotonic()
        FAULTS.take()  # of an attempt that failed
        result = self.function(element)
        seconds = time.monotonic() - started
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
