"""Read whole bodies from S3, compare them with their MD5, and cut requests that take too long.

A socket's own time limit bounds each wait, so a server that sends a byte every 2 s never exceeds
it. The watchdog bounds the whole request, whatever its phase: connect, send, wait, headers or body.
It shuts the socket down, and the waiting thread sees a broken connection.
"""

import hashlib
import io
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from infra.store.objects import Admit, Fetched, FetchedRange, ObjectInfo, admit_all
from infra.store.s3_errors import CorruptTransferError
from infra.task_metrics import REQUESTS, RequestCounts

PATIENCE_S = 60.0
_SLOWEST_BYTES_PER_S = 1e6
_SWEEP_INTERVAL_S = 0.5


def time_limit_s(num_bytes: int) -> float:
    """Return a request's limit: a minute, plus a second for each megabyte of its body."""
    return PATIENCE_S + num_bytes / _SLOWEST_BYTES_PER_S


class Watch:
    """Watch holds the deadline and the socket of one request after another, in one thread.

    Used in a `with`: it raises CorruptTransferError where the watchdog cut the request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_cut = False
        self._outer: Watch | None = None
        self.begin(0)

    def begin(self, num_bytes: int) -> None:
        """Begin a request that sends a body of `num_bytes`."""
        self._begun_s = time.monotonic()
        self._received = 0
        self.allow(num_bytes)

    def allow(self, num_bytes: int) -> None:
        """Set the limit to that of a body of `num_bytes`, counted from the request's begin."""
        self._limit_s = time_limit_s(num_bytes)

    def receive(self, num_bytes: int) -> None:
        """Count bytes of the answer's body, for the message."""
        self._received += num_bytes

    def hold(self, connected: Any) -> None:  # noqa: ANN401 - a socket, with or without TLS
        """Hold the socket that the request uses from now on."""
        # A duplicate of its own: the kernel may give a closed descriptor to another connection,
        # and TLS replaces the Python object. Shutting down reaches all duplicates.
        descriptor = os.dup(connected.fileno())
        with self._lock:
            self._close()
            self._descriptor = descriptor
            if self._is_cut:
                self._shut_down()

    def cut_if_late(self, now_s: float) -> None:
        """Shut the socket down if the deadline has passed; called by the watchdog's thread."""
        with self._lock:
            if not self._is_cut and now_s > self._begun_s + self._limit_s:
                self._is_cut = True
                self._shut_down()

    def __enter__(self) -> "Watch":
        self._outer = current_watch()
        _THREAD.watch = self
        _WATCHDOG.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        _THREAD.watch = self._outer
        _WATCHDOG.discard(self)
        with self._lock:
            self._close()
        # Also without an error: a body that ends where its connection ends looks whole.
        if self._is_cut and (error is None or isinstance(error, Exception)):
            came = f"{self._received} bytes of the answer's body had come"
            raise CorruptTransferError(f"cut after {self._limit_s:g} s ({came})") from error

    def _shut_down(self) -> None:
        if self._descriptor is not None:
            duplicate = socket.socket(fileno=self._descriptor)
            with suppress(OSError):  # it is not connected any more
                duplicate.shutdown(socket.SHUT_RDWR)
            duplicate.detach()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def current_watch() -> Watch | None:
    """Return the watch of this thread's request."""
    watch: Watch | None = getattr(_THREAD, "watch", None)
    return watch


class _Watchdog:
    """_Watchdog looks at all of this process's requests twice a second, in one thread."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without requests and thread: a forked child has neither."""
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._sweep, name="watchdog", daemon=True)
                self._thread.start()

    def discard(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def _sweep(self) -> None:
        never = threading.Event()
        while not never.wait(_SWEEP_INTERVAL_S):
            now_s = time.monotonic()
            with self._lock:
                watches = tuple(self._watches)
            for watch in watches:
                watch.cut_if_late(now_s)


_THREAD = threading.local()
_WATCHDOG = _Watchdog()
os.register_at_fork(after_in_child=_WATCHDOG.after_fork)


class _WatchedConnection:
    """_WatchedConnection shows the socket of each request to the watch of its thread."""

    sock: Any

    def _new_conn(self) -> socket.socket:
        connected: socket.socket = super()._new_conn()
        _hold(connected)  # before the proxy's answer and TLS's handshake
        return connected

    def request(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401
        _hold(self.sock)  # None, unless the connection was kept
        super().request(*arguments, **settings)


def _hold(connected: socket.socket | None) -> None:
    watch = current_watch()
    if watch is not None and connected is not None:
        watch.hold(connected)


class _PlainConnection(_WatchedConnection, AWSHTTPConnection):
    pass


class _TlsConnection(_WatchedConnection, AWSHTTPSConnection):
    pass


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def watch_requests(client: Any) -> None:  # noqa: ANN401 - boto3 makes clients' classes at run time
    """Let the requests of a boto3 client show their sockets to the watch of their thread."""
    # botocore has no public way in; the pools of hosts and proxies share this dictionary.
    pools = client._endpoint.http_session._pool_classes_by_scheme
    pools.update(http=_PlainPool, https=_TlsPool)


CHUNK_BYTES = 2**20
_MD5 = re.compile(r"[0-9a-f]{32}")


def read_object(answer: Mapping[str, Any], admit: Admit) -> Fetched:
    """Read the whole body of a GET; CorruptTransferError if it breaks off or its ETag differs.

    `admit` learns the object's size before the first byte is read; of an answer in chunks, which
    states no size, it learns the size so far.
    """
    data = read_body(answer, admit)
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    require_md5(answer, md5)
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    if "ContentLength" not in answer and not is_chunked and not _has_md5(answer):
        missing = "neither a Content-Length nor an MD5: if it broke off, it would look whole"
        raise CorruptTransferError(f"an answer with {missing}")
    return Fetched(data, md5)


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def read_range(answer: Mapping[str, Any], start: int, num_bytes: int) -> FetchedRange:
    """Read the body of a GET with a range; CorruptTransferError unless it is the range.

    S3 gives no digest of a range.
    """
    stated = _CONTENT_RANGE.fullmatch(required(answer, "ContentRange"))
    if stated is None or int(stated[1]) != start:
        raise CorruptTransferError(f"the range {answer['ContentRange']!r} for one from {start}")
    object_bytes = int(stated[3])
    expected = min(num_bytes, object_bytes - start)
    data = read_body(answer, admit_all)
    if len(data) != expected:
        raise CorruptTransferError(f"{len(data)} bytes came of {expected} from {start}")
    return FetchedRange(data, object_bytes, etag_of(answer))


def read_body(answer: Mapping[str, Any], admit: Admit) -> bytes:
    """Read the whole body, whose time the watchdog limits by its size."""
    body, num_bytes, watch = answer["Body"], answer.get("ContentLength"), current_watch()
    whole = io.BytesIO()
    while True:
        expected = whole.tell() if num_bytes is None else num_bytes
        admit(expected)
        if watch is not None:
            watch.allow(expected)
        chunk: bytes = body.read(CHUNK_BYTES)
        if not chunk:
            return whole.getvalue()
        whole.write(chunk)
        REQUESTS.add(RequestCounts(bytes_received=len(chunk)))
        if watch is not None:
            watch.receive(len(chunk))


def etag_of(answer: Mapping[str, Any]) -> str:
    """Return the ETag without its quotes, or "" for an answer without one."""
    etag: str = answer.get("ETag", "").strip('"')
    return etag


def described(uri: str, answer: Mapping[str, Any]) -> ObjectInfo:
    """Describe an object by the answer to a HEAD request."""
    size, written_at = required(answer, "ContentLength"), answer.get("LastModified")
    return ObjectInfo(uri, size, etag_of(answer), written_at)


def required(answer: Mapping[str, Any], field: str) -> Any:  # noqa: ANN401 - of the field's type
    """Return a field of an answer; CorruptTransferError for an answer without it."""
    if field not in answer:
        raise CorruptTransferError(f"an answer without {field}")
    return answer[field]


def require_md5(answer: Mapping[str, Any], md5: str) -> None:
    """Raise CorruptTransferError if the ETag is an MD5 other than `md5`.

    Other ETags are accepted unchecked: those of multipart uploads contain a dash, and those of
    objects encrypted under KMS or customers' keys are random.
    """
    if _has_md5(answer) and (etag := etag_of(answer)) != md5:
        raise CorruptTransferError(f"MD5 of the bytes is {md5}, the store's ETag says {etag}")


def _has_md5(answer: Mapping[str, Any]) -> bool:
    encrypted = "aws:kms" in answer.get("ServerSideEncryption", "")
    encrypted = encrypted or "SSECustomerAlgorithm" in answer
    return not encrypted and _MD5.fullmatch(etag_of(answer)) is not None
