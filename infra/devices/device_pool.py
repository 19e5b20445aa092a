"""Schedule a host's tasks on its devices: the local scheduler of paper 003 (III-C, IV-B3).

Each device has one server process, which holds the model. Tasks are short-lived and send the
server their requests.
"""

import hashlib
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infra.devices.device_server import (
    ANSWER,
    FAILURE,
    MessageError,
    ServerSettings,
    receive_message,
    send_message,
)
from infra.devices.file_locks import least_busy, locked
from infra.devices.pool_folder import held, remove_abandoned

_MAX_ATTEMPTS = 3
_POLL_INTERVAL_S = 0.05
_CONNECT_LIMIT_S = 60.0  # a server accepts at once, unless 128 others are queued
# Not TMPDIR, which may differ between the executors of a host.
_POOLS = Path("/tmp")  # noqa: S108 - the directory below it is checked to be ours alone

# Servers outlive this process; their handles let the interpreter collect exit statuses.
_STARTED: "list[subprocess.Popen[bytes]]" = []


class DeviceError(RuntimeError):
    """DeviceError says that a device's server did not start, was lost or failed, and why."""


class _ServerLostError(Exception):
    """_ServerLostError says that a server did not start, or ended before it answered."""


@dataclass(frozen=True)
class DevicePool:
    """DevicePool starts a server process for each device and shares it among a host's tasks.

    `factory` ("module:function") is called in the server as `function(device, **arguments)` and
    returns the function from request to answer. A pool can be pickled, and all its copies find
    the same servers. A server starts with its first request and ends after `idle_timeout_s`.
    """

    factory: str
    arguments: Mapping[str, str]
    devices: tuple[str, ...]
    idle_timeout_s: float
    start_timeout_s: float = 600.0
    request_timeout_s: float = 3600.0
    # Servers of another run, with other code, must not answer this pool.
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.]+:\w+", self.factory):
            raise ValueError(f"factory = {self.factory!r}: need 'module:function'")
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices = {self.devices}: need one or more, each once")
        for name in ("idle_timeout_s", "start_timeout_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: need more than 0 seconds")

    def request(self, payload: bytes) -> bytes:
        """Send `payload` to the least busy device and return its answer.

        A request whose server does not start or ends without an answer is retried on another
        device, three attempts in all. Raises ValueError for a ValueError of the function, which
        blames the request. Raises DeviceError for its other errors, which are not retried, after
        the last attempt, and after `request_timeout_s`, when the server is killed.
        """
        with held(self._folder()):
            return self._request(payload)

    def _request(self, payload: bytes) -> bytes:
        lost: dict[str, str] = {}
        for _ in range(_MAX_ATTEMPTS):
            # A device that cannot answer is never busy, so it would otherwise get every task.
            untried = [name for name in self._names() if name not in lost] or self._names()
            with least_busy(self._directory(), untried) as name:
                try:
                    return self._ask(name, payload)
                except _ServerLostError as error:
                    lost[name] = f"{self._device(name)}: {error}"
        attempts = f"{_MAX_ATTEMPTS} attempts, logs in {self._directory()}"
        raise DeviceError(f"{self.factory} failed on {'; '.join(lost.values())} ({attempts})")

    def _directory(self) -> Path:
        served = [self.factory, sorted(self.arguments.items()), self.devices]
        name = hashlib.sha256(json.dumps(served).encode()).hexdigest()[:16]
        directory = self._folder() / name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def _folder(self) -> Path:
        return _private_directory() / self.token

    def _names(self) -> list[str]:
        return [str(index) for index in range(len(self.devices))]

    def _device(self, name: str) -> str:
        return self.devices[int(name)]

    def _ask(self, name: str, payload: bytes) -> bytes:
        with self._connect(name) as connection:
            connection.settimeout(self.request_timeout_s)
            try:
                send_message(connection, ANSWER, payload)
                kind, body = receive_message(connection)
            except TimeoutError as error:
                os.kill(_server_pid(connection), signal.SIGKILL)
                limit = f"no answer in {self.request_timeout_s:g} s, so its server was killed"
                raise DeviceError(f"{self.factory} on {self._device(name)}: {limit}") from error
            except MessageError as error:
                message = f"{self.factory} on {self._device(name)}: {error}"
                raise DeviceError(message) from error
            except (EOFError, OSError) as error:
                raise _ServerLostError("its server ended before it answered") from error
        if kind == ANSWER:
            return body
        message = f"{self.factory} on {self._device(name)}: {body.decode()}"
        raise DeviceError(message) if kind == FAILURE else ValueError(message)

    def _connect(self, name: str) -> socket.socket:
        path = self._directory() / name
        try:
            connection = _try_connect(path)
            if connection is not None:
                return connection
            with locked(path.with_suffix(".starting"), 2 * self.start_timeout_s):
                return _try_connect(path) or self._start(name, path)
        except TimeoutError as error:
            raise _ServerLostError(f"its server cannot be reached: {error}") from error

    def _start(self, name: str, path: Path) -> socket.socket:
        process = self._spawn(name, path)
        deadline_s = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline_s:
            connection = _try_connect(path)
            if connection is not None:
                return connection
            if process.poll() is not None:
                raise _ServerLostError(f"its server did not start: {_last_line(path)}")
            time.sleep(_POLL_INTERVAL_S)
        process.kill()
        raise _ServerLostError(f"its server did not start within {self.start_timeout_s:g} s")

    def _spawn(self, name: str, path: Path) -> "subprocess.Popen[bytes]":
        settings = ServerSettings(
            factory=self.factory,
            arguments=dict(self.arguments),
            device=self._device(name),
            socket_path=str(path),
            idle_timeout_s=self.idle_timeout_s,
        )
        remove_abandoned(_private_directory())
        import_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with path.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "infra.devices.device_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": import_path},
                start_new_session=True,  # Spark kills its workers by their process group
            )
        _STARTED.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended already
            stdin.write(json.dumps(asdict(settings)).encode())
        return process


def _private_directory() -> Path:
    ours = _POOLS / f"megahour-{os.getuid()}"
    ours.mkdir(mode=0o700, exist_ok=True)
    status = ours.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DeviceError(f"{ours}: need a directory that is ours alone (mode 700): remove it")
    return ours


def _try_connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CONNECT_LIMIT_S)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def _server_pid(connection: socket.socket) -> int:
    credentials = struct.Struct("3i")  # pid, uid, gid
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid: int = credentials.unpack(packed)[0]
    return pid


def _last_line(path: Path) -> str:
    lines = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no message")
