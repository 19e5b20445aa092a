"""Watch the exchanges for which no host waits, such as NCCL's between GPUs."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Work(Protocol):
    """Work is the used part of torch.distributed's: an exchange that was started."""

    def is_completed(self) -> bool:
        """Return whether the device has done it, without waiting."""
        ...


@dataclass(frozen=True, slots=True)
class Pending:
    """Pending is an exchange that was under way when it was last looked at."""

    exchange: str
    since: float
    work: Work


class DeviceExchanges:
    """DeviceExchanges holds those that are under way, the oldest first; threads share it."""

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()
        self._lock = threading.Lock()

    def add(self, exchange: str, work: Work) -> None:
        """Watch one more."""
        with self._lock:
            self._drop_completed()
            self._pending.append(Pending(exchange, time.monotonic(), work))

    def oldest(self) -> Pending | None:
        """Return the one that is under way for longest, if there is any."""
        with self._lock:
            self._drop_completed()
            return self._pending[0] if self._pending else None

    def _drop_completed(self) -> None:
        while self._pending and _is_over(self._pending[0].work):
            self._pending.popleft()


def _is_over(work: Work) -> bool:
    try:
        return work.is_completed()
    except RuntimeError:
        # The device has failed: each later call of this process raises so, its host's too.
        return True


def end_process(message: str) -> None:
    """End this process with status 1 and one line on standard error, and without any cleanup.

    Its host may wait within CUDA for a device that waits for a dead rank: nothing can be raised.
    """
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


@contextmanager
def ending_process_after(limit_s: float, message: str) -> Iterator[None]:
    """End this process with `message`, as `end_process` does, if what is within takes longer."""
    timer = threading.Timer(limit_s, end_process, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
