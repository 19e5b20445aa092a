"""Faults of a host's devices that tasks saw, for a job's record, its last lines and the report."""

import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

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
