"""Clients of the device servers of tests, and what they know of the servers' processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.devices.device_client import PoolAnswer, RequestStream
from infra.devices.device_pool import DevicePool, _file_name
from infra.devices.messages import PoolRequest
from tests.process_tree import lives

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
    wait_until(lambda: not lives(pid))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def socket_path(pool: DevicePool) -> Path:
    """Return where the first device's server listens."""
    return pool._directory() / _file_name(pool.devices[0])


@contextmanager
def run(program: str, *arguments: str, given: bytes = b"") -> "Iterator[subprocess.Popen[bytes]]":
    """Run a program beside the test, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout, process.stdin as stdin:
        stdin.write(given)
        stdin.flush()
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def listening(path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a program that accepts at a path of a server's and never answers."""
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
    program += "s.listen(); print(flush=True); sys.stdin.read()"
    with run(program, str(path)) as foreign:
        assert foreign.stdout is not None
        foreign.stdout.readline()
        yield foreign
