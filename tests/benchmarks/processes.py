"""Watch the processes below this one: processor time and peak memory, by what they do."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.process_tree import descendants

T = TypeVar("T")
R = TypeVar("R")

LOOK_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int | str = "self") -> float:
    """Return the largest resident memory that a process ever had; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) / 1024 if found else 0.0


def with_core_seconds(function: Callable[[T], R], element: T) -> tuple[R, float]:
    """Return a task's result and its worker's processor time."""
    started = time.process_time()
    result = function(element)
    return result, time.process_time() - started


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, without its children's; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def kind_of(command: str) -> str:
    """Return what a process of a job does."""
    program = command.partition(" ")[0]
    if program.endswith("java"):
        return "JVM"
    if "pyspark.daemon" in command:
        return "worker"
    return "server" if "infra.devices" in command else "driver"


@dataclass
class ProcessWatch:
    """ProcessWatch keeps processor seconds and peak memory of each process that it has seen.

    A process is counted up to the last look, so each ends up to LOOK_S short.
    """

    kind: Callable[[str], str] = kind_of
    kinds: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    peaks_mb: dict[int, float] = field(default_factory=dict)

    def look(self) -> None:
        """Look at all processes once."""
        for pid, command in descendants(os.getpid()):
            if command:  # a zombie's is empty
                self.kinds[pid] = self.kind(command)
            self.seconds[pid] = max(self.seconds.get(pid, 0.0), cpu_seconds(pid))
            self.peaks_mb[pid] = max(self.peaks_mb.get(pid, 0.0), peak_mb(pid))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look five times a second."""
        done = threading.Event()

        def run() -> None:
            while not done.wait(LOOK_S):
                self.look()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def seconds_of(self, kind: str) -> float:
        """Sum the processor time of all processes of a kind."""
        return sum(self.seconds[pid] for pid, each in self.kinds.items() if each == kind)

    def peak_of(self, kind: str) -> float:
        """Return the largest peak among the processes of a kind."""
        peaks = (self.peaks_mb[pid] for pid, each in self.kinds.items() if each == kind)
        return max(peaks, default=0.0)
