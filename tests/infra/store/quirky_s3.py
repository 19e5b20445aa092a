"""An S3 in memory with the quirks of stores that speak its protocol and keep it in part."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


def by_bytes(key: str) -> object:
    """Order keys as S3 does."""
    return key.encode()


def by_walk(key: str) -> object:
    """Order keys as directories are walked."""
    return key.split("/")


@dataclass
class QuirkySettings:
    """The objects of one bucket, and how the store behaves; a test may change both at any time.

    `decides_late` lets a conditional write through that no other had finished before it came.
    `refusal` is the status and code of the answer to a conditional write. `page_of` chooses the
    keys of a page and whether it is the last, of all keys in order and the one to begin behind.
    `headers` are those of each GET.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    order: Callable[[str], object] = by_bytes
    page_size: int = 1000
    ignores_condition: bool = False
    decides_late: bool = False
    refusal: tuple[int, str] = (0, "")
    hidden: str = ""
    page_of: Callable[[list[str], str], tuple[list[str], bool]] | None = None
    headers: list[Message] = field(default_factory=list)

    def page(self, prefix: str, after: str) -> tuple[list[str], bool]:
        """Return the keys of a page, and whether it is the last."""
        found = sorted((key for key in self.objects if key.startswith(prefix)), key=self.order)
        found = [key for key in found if not self.hidden or self.hidden not in key]
        if self.page_of is not None:
            return self.page_of(found, after)
        left = [key for key in found if key > after]
        return left[: self.page_size], len(left) <= self.page_size


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in two packets takes 40 ms
    settings: QuirkySettings
    writing = threading.Lock()

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()  # otherwise boto3 waits a second for it
        return True

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        key = unquote(urlsplit(self.path).path).split("/", 2)[2:]
        self._answer(200 if not any(key) or key[0] in self.settings.objects else 404)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        settings, key = self.settings, unquote(urlsplit(self.path).path).split("/", 2)[2]
        with nullcontext() if settings.decides_late else self.writing:
            status, code = self._refusal(key)
            if settings.decides_late:
                time.sleep(0.02)
            if not status:
                settings.objects[key] = data
        self._answer(status or 200, f"<Error><Code>{code}</Code></Error>".encode() * bool(status))

    def _refusal(self, key: str) -> tuple[int, str]:
        settings = self.settings
        if "If-None-Match" not in self.headers:
            return 0, ""
        if key in settings.objects and not settings.ignores_condition and not settings.refusal[0]:
            return 412, "PreconditionFailed"
        return settings.refusal

    def do_GET(self) -> None:
        self.settings.headers.append(self.headers)
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if "list-type" not in query:
            data = self.settings.objects.get(unquote(parts.path).split("/", 2)[2])
            self._answer(404 if data is None else 200, data or b"")
            return
        prefix, after = (query.get(name, [""])[0] for name in ("prefix", "start-after"))
        keys, is_last = self.settings.page(prefix, after)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in keys
        )
        more = f"<IsTruncated>{'false' if is_last else 'true'}</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{more}{contents}</ListBucketResult>".encode())


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # of five, a connection that waits is tried again only after a second


@contextmanager
def quirky_s3() -> Iterator[tuple[str, QuirkySettings]]:
    """Serve a store that has no quirks yet; yield its URL and its settings."""
    settings = QuirkySettings()
    handler = type("_Handler", (_Handler,), {"settings": settings})
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", settings
        server.shutdown()
