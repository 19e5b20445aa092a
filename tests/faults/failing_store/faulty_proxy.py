"""Run a proxy before an S3 server that fails, corrupts or loses a seeded share of the requests.

It speaks plain TCP and HTTP/1.1, so the client sees what a bad network or server would send.
"""

import http.client
import random
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

EVERYWHERE = ("internal_error", "slow_down", "stall", "reset_before", "reset_after")
READS = (*EVERYWHERE, "short_body", "corrupt_body")
REFUSALS = ("not_found", "denied")
KINDS = {
    "GET": (*READS, *REFUSALS),
    "LIST": (*READS, *REFUSALS),
    "HEAD": (*EVERYWHERE, *REFUSALS),
    "DELETE": EVERYWHERE,
    "PUT": (*EVERYWHERE, "corrupt_upload"),
    "COPY": EVERYWHERE,
}
ERRORS = {
    "internal_error": (500, "InternalError"),
    "slow_down": (503, "SlowDown"),
    "not_found": (404, "NoSuchKey"),
    "denied": (403, "AccessDenied"),
}
UPSTREAM_TIMEOUT_S = 60.0
HOP_BY_HOP = {"connection", "expect", "keep-alive", "transfer-encoding", "content-length"}


@dataclass
class FaultyProxy:
    """FaultyProxy counts requests and injected faults by operation (GET, PUT, LIST, ...) and kind.

    A fault that does not apply, such as a short body where there is none, is neither injected nor
    counted.
    """

    upstream: str
    rate: float
    seed: int
    stall_s: float
    weights: Mapping[str, float]
    limit: int
    bare: bool
    endpoint: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    paths: list[tuple[str, str]] = field(default_factory=list)
    injected: Counter[tuple[str, str]] = field(default_factory=Counter)
    max_in_flight: int = 0
    closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._in_flight = 0
        self._num_asked = 0

    @property
    def num_faults(self) -> int:
        """Count the injected faults of all kinds."""
        return sum(self.injected.values())

    def draw(self, operation: str, path: str) -> str:
        """Count a request that begins, and choose its fault; "" for none."""
        with self._lock:
            self.requests[operation] += 1
            self.paths.append((operation, path))
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            kinds = [kind for kind in KINDS[operation] if self.weights.get(kind, 1.0)]
            spent = sum(self.injected.values()) >= self.limit
            if spent or not kinds or self._random.random() >= self.rate:
                return ""
            return self._random.choices(kinds, [self.weights.get(kind, 1.0) for kind in kinds])[0]

    def is_odd(self) -> bool:
        """Return true for every other call."""
        with self._lock:
            self._num_asked += 1
            return self._num_asked % 2 == 1

    def finish(self) -> None:
        """Count a request that ends."""
        with self._lock:
            self._in_flight -= 1

    def record(self, operation: str, kind: str) -> None:
        """Count a fault that was injected."""
        with self._lock:
            self.injected[operation, kind] += 1

    def flip(self, data: bytes) -> bytes:
        """Return `data` with one bit of one byte changed."""
        with self._lock:
            place, bit = self._random.randrange(len(data)), 1 << self._random.randrange(8)
        return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


@contextmanager
def faulty_proxy(
    upstream: str,
    rate: float,
    seed: int = 0,
    stall_s: float = 60.0,
    weights: Mapping[str, float] | None = None,
    limit: int = sys.maxsize,
    bare: bool = False,
) -> Iterator[FaultyProxy]:
    """Run a proxy before `upstream` that injects up to `limit` faults.

    `weights` of the kinds of faults are 1 by default. Of a `bare` proxy's GETs, every other answer
    comes in chunks, without Content-Length and ETag.
    """
    host = urlsplit(upstream).netloc
    proxy = FaultyProxy(host, rate, seed, stall_s, weights or {}, limit, bare)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = _Server(("127.0.0.1", 0), handler)
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Ignore clients that hang up; the tests make them."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: FaultyProxy

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        operation = "LIST" if "list-type=" in self.path else self.command
        if "x-amz-copy-source" in self.headers:
            operation = "COPY"
        kind = self.proxy.draw(operation, self.path)
        try:
            self._act(operation, kind)
        finally:
            self.proxy.finish()

    def _act(self, operation: str, kind: str) -> None:
        def record() -> None:
            self.proxy.record(operation, kind)

        if kind == "reset_before":
            record()
            self._reset()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if kind == "stall":
            record()
            self.proxy.closing.wait(self.proxy.stall_s)
            self._reset()
        elif kind in ERRORS:
            record()
            self._error(*ERRORS[kind])
        elif kind == "corrupt_upload" and body:
            record()
            self._relay(*self._forward(self.proxy.flip(body)))
        elif kind == "reset_after":
            self._forward(body)
            record()
            self._reset()
        else:
            self._damage(kind, record, *self._forward(body))

    def _damage(
        self,
        kind: str,
        record: Callable[[], None],
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
    ) -> None:
        applies = status in {200, 206} and len(body) > 0
        if kind == "short_body" and applies:
            record()
            self._relay(status, headers, body[: len(body) // 2], len(body))
            self.close_connection = True
        elif kind == "corrupt_body" and applies:
            record()
            self._relay(status, headers, self.proxy.flip(body))
        else:
            self._relay(status, headers, body)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self.proxy.upstream, timeout=UPSTREAM_TIMEOUT_S)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    upstream.putheader(name, value)  # Host too: it is signed
            if body or self.command == "PUT":
                upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _relay(
        self, status: int, headers: list[tuple[str, str]], body: bytes, promised: int | None = None
    ) -> None:
        if self.proxy.bare and status == 200 and self.command == "GET" and self.proxy.is_odd():
            self._relay_bare(headers, body)
            return
        self.send_response_only(status)
        length = str(len(body) if promised is None else promised)
        for name, value in headers:
            if self.command == "HEAD" and name.lower() == "content-length":
                length = value
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)

    def _relay_bare(self, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(200)
        for name, value in headers:
            if name.lower() not in {*HOP_BY_HOP, "etag"}:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for first in range(0, len(body), 1000):
            chunk = body[first : first + 1000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def _error(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
        body = b"" if self.command == "HEAD" else text.encode()
        self._relay(status, [("Content-Type", "application/xml")], body)

    def _reset(self) -> None:
        # No lingering: closing sends RST, not FIN.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()
        self.wfile.close()
        self.connection.close()
