"""Schedule a host's tasks on its devices: the local scheduler of paper 003 (III-C, IV-B3).

Each device has one server process, which holds the model. Tasks are short-lived and send the
server their requests.

The processes share a pool's folder by lock files. The kernel frees the locks of a process that
ends, even of one that is killed. The folder is held while any process uses it, and removed when
none does.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

from infra.devices.messages import MAX_FRAMES
from infra.host_folder import locked, private_folder, try_lock
from infra.settings import AUTO, Range, Text, check_ranges

ENDED = "ended: "
"""What the last line of a server's log begins with if the server ended itself."""

_POLL_INTERVAL_S = 0.05
_CHOOSING_LIMIT_S = 60.0  # choosing takes a millisecond
_CONNECT_LIMIT_S = 60.0  # a server accepts at once, unless 128 others are queued

# Servers outlive this process; their handles let the interpreter collect exit statuses.
_STARTED: "list[subprocess.Popen[bytes]]" = []


class DeviceError(RuntimeError):
    """DeviceError says that no device of a host can be used, and why."""


class ServerLostError(Exception):
    """ServerLostError says that a device's server did not start, or ended, and why."""


@dataclass(frozen=True)
class DevicePool:
    """DevicePool starts a server process for each device and shares it among a host's tasks.

    `factory` ("module:function") is called in the server as `function(device, **arguments)` and
    returns a `DeviceFunction`. Each task finds the `devices` of its host itself (`task_devices`).
    A batch has at most `batch_frames` padded frames. A pool can be pickled, and all its copies
    find the same servers. A server starts with its first client and ends `idle_timeout_s` after
    its last.
    """

    factory: Annotated[str, Text(3, 1000, r"[\w.]+:\w+", "module:function")]
    arguments: dict[Annotated[str, Text(1, 1000)], Annotated[str, Text(0, 1 << 20)]]
    devices: tuple[str, ...] | Literal["auto"]
    batch_frames: Annotated[int, Range(1, MAX_FRAMES)]
    idle_timeout_s: Annotated[float, Range(1e-3, 1e9)]
    start_timeout_s: Annotated[float, Range(1e-3, 1e9)] = 600.0
    # Servers of another run, with other code, must not answer this pool.
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        check_ranges(self)
        is_list = self.devices != AUTO
        if is_list and (not self.devices or len(set(self.devices)) < len(self.devices)):
            raise ValueError(f"devices = {self.devices}: need one or more, each once")

    @contextmanager
    def in_use(self) -> Iterator[Path]:
        """Keep the pool's folder, with its servers' logs, as long as the context lasts."""
        with held(self._folder()):
            yield self._directory()

    @contextmanager
    def least_busy(self, devices: Sequence[str]) -> Iterator[str]:
        """Choose the device of the fewest clients on this host, and count as one of its clients."""
        names = {_file_name(each): each for each in devices}
        with least_busy(self._directory(), list(names)) as name:
            yield names[name]

    def connect(self, device: str) -> socket.socket:
        """Connect to a device's server, which is started if there is none.

        Raises ServerLostError if it cannot be reached, with the last line of its log.
        """
        path = self._directory() / _file_name(device)
        try:
            connection = _try_connect(path)
            if connection is not None:
                return connection
            with locked(path.with_suffix(".starting"), 2 * self.start_timeout_s):
                return _try_connect(path) or self._start(device, path)
        except TimeoutError as error:
            raise ServerLostError(f"its server cannot be reached: {error}") from error

    def last_words(self, device: str) -> str:
        """Return why a device's last server ended itself, or that it did not say."""
        log = (self._directory() / _file_name(device)).with_suffix(".log")
        # Without a log no server of ours listened there.
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = text.splitlines()
        said = [line.removeprefix(ENDED) for line in lines[-1:] if line.startswith(ENDED)]
        return said[0] if said else "it was killed, or crashed"

    def _directory(self) -> Path:
        # Where executors see other GPUs, cuda:0 of one is another's cuda:1.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        served = [self.factory, sorted(self.arguments.items()), self.batch_frames, seen]
        name = hashlib.sha256(json.dumps(served).encode()).hexdigest()[:16]
        directory = self._folder() / name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def _folder(self) -> Path:
        return _private_directory() / self.token

    def _start(self, device: str, path: Path) -> socket.socket:
        process = self._spawn(device, path)
        deadline_s = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline_s:
            connection = _try_connect(path)
            if connection is not None:
                return connection
            if process.poll() is not None:
                log = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
                lines = [line for line in log.split("\n") if line.strip()] or ["no message"]
                raise ServerLostError(f"its server did not start: {lines[-1]}")
            time.sleep(_POLL_INTERVAL_S)
        process.kill()
        raise ServerLostError(f"its server did not start within {self.start_timeout_s:g} s")

    def _spawn(self, device: str, path: Path) -> "subprocess.Popen[bytes]":
        remove_abandoned(_private_directory())
        import_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with path.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "infra.devices.device_server", device, str(path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": import_path},
                start_new_session=True,  # Spark kills its workers by their process group
            )
        _STARTED.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended already
            stdin.write(json.dumps(asdict(self)).encode())
        return process


def _private_directory() -> Path:
    try:
        return private_folder("megahour")
    except PermissionError as error:
        raise DeviceError(str(error)) from error


def _try_connect(path: Path) -> socket.socket | None:
    deadline_s = time.monotonic() + _CONNECT_LIMIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_CONNECT_LIMIT_S)
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except BlockingIOError as error:  # others are queued
            connection.close()
            if time.monotonic() > deadline_s:
                late = f"{path}: does not accept within {_CONNECT_LIMIT_S:g} s"
                raise TimeoutError(f"{late}: end the process that listens there") from error
        time.sleep(_POLL_INTERVAL_S)


def kill_server(connection: socket.socket) -> None:
    """Kill the server at the other end, unless another container hides it."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid = credentials.unpack(packed)[0]
    # Linux reports a hidden process as 0, by which kill means the caller's whole group.
    if pid > 0:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _file_name(device: str) -> str:
    # Short, as a socket's path has 107 characters at most.
    digest = hashlib.sha256(device.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9]', '-', device)[:12]}-{digest}"


@contextmanager
def least_busy(directory: Path, names: Sequence[str]) -> Iterator[str]:
    """Hold a slot of the name with the fewest held slots, the first of equals; yield the name."""
    with locked(directory / "choosing", _CHOOSING_LIMIT_S):
        name = min(names, key=lambda name: _num_held(directory, name))
        attempts = (try_lock(directory / f"{name}.slot-{number}") for number in count())
        slot = next(slot for slot in attempts if slot is not None)
    try:
        yield name
    finally:
        os.close(slot)


def _num_held(directory: Path, name: str) -> int:
    slots = [try_lock(path) for path in directory.glob(f"{name}.slot-*")]
    for slot in slots:
        if slot is not None:
            os.close(slot)
    return slots.count(None)


_IN_USE = "in_use"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make `folder` and keep `remove_abandoned` from it; the kernel frees what a killed one held.

    Clients hold it during a request, servers as long as they live.
    """
    descriptor = _hold(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _hold(folder: Path) -> int:
    while True:
        with suppress(FileExistsError):  # Path.mkdir(exist_ok) fails if it is removed meanwhile
            folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # it was removed at this moment
            descriptor = _open_folder(folder)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_in(folder, descriptor):
                return descriptor
            os.close(descriptor)


def remove_abandoned(folders: Path) -> None:
    """Remove each of `folders` that no process holds, such as one whose server was killed."""
    for folder in list(folders.iterdir()):
        with suppress(OSError):  # held, or removed by another process
            _remove(folder)


def _remove(folder: Path) -> None:
    descriptor = _open_folder(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_in(folder, descriptor):
            return
        # Renamed first: who holds its name from now on makes a new folder.
        removed = folder.with_name(f".removed-{uuid.uuid4().hex}")
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    finally:
        os.close(descriptor)


def _open_folder(folder: Path) -> int:
    return os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_in(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / _IN_USE).stat())
    except FileNotFoundError:
        return False
