"""Serve one device: make its function once, then apply it to one request after another.

infra/devices/device_pool.py starts this program with its settings as JSON on standard input.
"""

import importlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from infra.configuration import read_record
from infra.devices.file_locks import locked
from infra.devices.pool_folder import held, remove_abandoned
from infra.ranges import Range, Text, check_ranges

ANSWER, BAD_REQUEST, FAILURE = b"A", b"B", b"F"
_HEADER = struct.Struct("<cQ")
MAX_MESSAGE_BYTES = 1 << 32
"""The longest message; the frames of an utterance of 24 hours, the longest, have 2.2 GB."""

_STALL_LIMIT_S = 60.0  # the limit of a client's pause between two bytes
_PREDECESSOR_LIMIT_S = 600.0


@dataclass(frozen=True)
class ServerSettings:
    """ServerSettings names the function to serve ("module:function"), its device and socket."""

    factory: Annotated[str, Text(3, 1000, r"[\w.]+:\w+", "module:function")]
    arguments: dict[Annotated[str, Text(1, 1000)], Annotated[str, Text(0, 10_000)]]
    device: Annotated[str, Text(1, 100)]
    socket_path: Annotated[str, Text(1, 107)]
    idle_timeout_s: Annotated[float, Range(1e-3, 1e9)]

    __post_init__ = check_ranges

    @property
    def pool_folder(self) -> Path:
        """Return the folder of all that belongs to the pool."""
        return Path(self.socket_path).parents[1]


class MessageError(ValueError):
    """MessageError says that a message is longer than the bound, or of no known kind."""


def send_message(connection: socket.socket, kind: bytes, body: bytes) -> None:
    """Send one byte of kind, the length as eight bytes, and the body; MessageError if too long."""
    _check_length(len(body))
    connection.sendall(_HEADER.pack(kind, len(body)))
    connection.sendall(body)


def receive_message(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive a message's kind and body; raise EOFError if the connection closes too early.

    Raises MessageError, before it reserves memory, for a message that is too long.
    """
    kind, num_bytes = _HEADER.unpack(_receive(connection, _HEADER.size))
    if kind not in (ANSWER, BAD_REQUEST, FAILURE):
        raise MessageError(f"message of kind {kind!r}: need A, B or F")
    _check_length(num_bytes)
    return kind, _receive(connection, num_bytes)


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {num_bytes} bytes: need at most {MAX_MESSAGE_BYTES}")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view, position = memoryview(data), 0
    while position < num_bytes:
        received = connection.recv_into(view[position:])
        if received == 0:
            raise EOFError(f"connection closed after {position} of {num_bytes} bytes")
        position += received
    return bytes(data)


class DeviceServer:
    """DeviceServer answers requests on a Unix socket, one at a time, until it is idle too long.

    A ValueError of the function goes to the client, and the server continues. After any other
    error the server sends the error and ends, as a failed GPU context may fail again.
    """

    def __init__(self, settings: ServerSettings, function: Callable[[bytes], bytes]) -> None:
        self._settings = settings
        self._function = function
        self._device_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._num_active = 0
        self._last_used_s = time.monotonic()

    def serve(self) -> None:
        """Answer requests; return when none has come for `idle_timeout_s`."""
        path = Path(self._settings.socket_path)
        path.unlink(missing_ok=True)  # left by a server that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(128)
            while (remaining_s := self._remaining_s()) > 0:
                listener.settimeout(remaining_s)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with self._count_lock:
                    self._num_active += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            path.unlink(missing_ok=True)

    def _remaining_s(self) -> float:
        with self._count_lock:
            if self._num_active:
                return self._settings.idle_timeout_s
            return self._last_used_s + self._settings.idle_timeout_s - time.monotonic()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_STALL_LIMIT_S)
                try:
                    _, payload = receive_message(connection)
                except MessageError as error:
                    send_message(connection, BAD_REQUEST, f"MessageError: {error}".encode())
                    return
                kind, body = self._apply(payload)
                try:
                    send_message(connection, kind, body)
                finally:
                    if kind == FAILURE:
                        # A GPU context that failed once may fail for every later request.
                        os._exit(1)
        except (EOFError, OSError):
            pass  # the client has ended and needs no answer
        finally:
            with self._count_lock:
                self._num_active -= 1
                self._last_used_s = time.monotonic()

    def _apply(self, payload: bytes) -> tuple[bytes, bytes]:
        self._device_lock.acquire()
        try:
            answer = ANSWER, self._function(payload)
            _check_length(len(answer[1]))
        except ValueError as error:
            answer = BAD_REQUEST, f"ValueError: {error}".encode()
        except BaseException as error:
            # Keep the lock: waiting requests end with this process, and their tasks retry them.
            traceback.print_exc()
            return FAILURE, f"{type(error).__name__}: {error}".encode()
        self._device_lock.release()
        return answer


def _main() -> None:
    settings = read_record(ServerSettings, json.load(sys.stdin), "settings")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with held(settings.pool_folder):
            _serve(settings)
    finally:
        remove_abandoned(settings.pool_folder.parent)


def _serve(settings: ServerSettings) -> None:
    # One server per device: wait for a predecessor that is about to end.
    with locked(Path(f"{settings.socket_path}.server"), _PREDECESSOR_LIMIT_S):
        module, _, name = settings.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        DeviceServer(settings, factory(settings.device, **settings.arguments)).serve()


if __name__ == "__main__":
    _main()
