"""Clients of the device servers of tests, and what they know of the servers' processes."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.devices.device_pool import DevicePool
from infra.devices.in_flight_requests import PoolAnswer, PoolRequest
from infra.devices.request_stream import RequestStream

COMMANDS = "tests.infra.devices.device_functions:Commands"
WINDOW = 100_000


def ask(pool: DevicePool, payloads: Sequence[bytes], num_frames: int = 10) -> list[PoolAnswer]:
    """Return the answers to requests of `num_frames` frames each."""
    stream = RequestStream(pool, WINDOW)
    return list(stream.answers(PoolRequest(num_frames, payload) for payload in payloads))


def where(pool: DevicePool) -> tuple[str, int]:
    """Return a device and its server's process."""
    return served_by(*ask(pool, [b"where"]))


def served_by(answer: PoolAnswer) -> tuple[str, int]:
    assert isinstance(answer, bytes)
    device, pid = answer.decode().split()
    return device, int(pid)


def server_of(made: Path) -> int:
    return int(made.name.rpartition("-")[2])


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    wait_until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
