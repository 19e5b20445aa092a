"""Run an S3 server whose answers a test writes byte by byte, on plain sockets."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.s3_server import set_endpoint

Script = Callable[["Request"], None]
Serve = Callable[..., None]
"""A function that lets a script answer requests from now on; settings are `scripted_server`'s."""


@dataclass(frozen=True)
class Request:
    """Request holds what a client sent, and its connection; `sleep` ends early with the server."""

    method: str
    path: str
    headers: dict[str, str]
    connection: socket.socket
    closing: threading.Event = field(repr=False)

    def send(self, data: bytes) -> None:
        """Send bytes of the answer."""
        self.connection.sendall(data)

    def answer(self, body: bytes = b"", status: str = "200 OK", **headers: str) -> None:
        """Send a whole answer with a Content-Length; underscores in the headers are dashes."""
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def hang_up(self) -> None:
        """End the connection after what was sent."""
        self.connection.shutdown(socket.SHUT_RDWR)

    def drip(self, data: bytes, interval_s: float) -> None:
        """Send a byte every `interval_s`, as long as the client listens."""
        for number in range(len(data)):
            if self.closing.wait(interval_s):
                return
            self.send(data[number : number + 1])


@contextmanager
def scripted_server(
    script: Script, receive: int = 2**20, tls: ssl.SSLContext | None = None, greets: bool = True
) -> Iterator[str]:
    """Answer each request by `script`, after its body was taken in by `receive` bytes a 0.1 s.

    With `greets` the first contact with the bucket is answered without the script.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    closing = threading.Event()

    def serve(accepted: socket.socket) -> None:
        # An OSError: the client has given up.
        with suppress(OSError), accepted:
            answer(tls.wrap_socket(accepted, server_side=True) if tls else accepted)

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            while line := lines.readline():
                method, path, _ = line.decode().split(" ", 2)
                pairs = iter(lambda: lines.readline().decode().strip().lower(), "")
                headers = dict(pair.split(": ", 1) for pair in pairs)
                remaining = int(headers.get("content-length", 0))
                if "expect" in headers:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                while remaining and not (remaining > receive and closing.wait(0.1)):
                    remaining -= len(lines.read(min(remaining, receive)))
                request = Request(method, path, headers, connection, closing)
                if greets and (method, path) == ("HEAD", "/bucket"):
                    request.answer()
                else:
                    script(request)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
    closing.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that starts a scripted server, and points the environment to it."""
    with ExitStack() as running:

        def start(script: Script, **settings: Any) -> None:
            set_endpoint(running.enter_context(scripted_server(script, **settings)), monkeypatch)

        yield start
