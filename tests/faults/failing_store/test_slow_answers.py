"""Every request has one deadline, whatever the server does slowly."""

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from infra.store import retry, s3, s3_bodies
from infra.store.object_store import ObjectStore, StoreError
from infra.task_metrics import REQUESTS
from tests.faults.failing_store.scripted_server import Request, Script, Serve
from tests.s3_server import set_endpoint

URI = "s3://bucket/x"
STORE = ObjectStore(("s3://bucket",))
PATIENCE_S = 0.5
DRIP_S = 0.1  # far below the read timeout of 20 s, which therefore never ends a request

HEADERS = b"HTTP/1.1 200 OK\r\n" + b"x-amz-meta-x: x\r\n" * 100
LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>" + b" " * 1000


def slow_headers(request: Request) -> None:
    request.drip(HEADERS, DRIP_S)


def slow_body(request: Request) -> None:
    request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    request.drip(LISTING[:1000], DRIP_S)


def slow_chunks(request: Request) -> None:
    request.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(1000):
        request.drip(b"1", DRIP_S)
        request.send(b"\r\nx\r\n")


def slow_error(request: Request) -> None:
    request.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 1000\r\n\r\n")
    request.drip(LISTING[:1000], DRIP_S)


def slow_range(request: Request) -> None:
    request.send(
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-999/1000\r\n"
        b"Content-Length: 1000\r\n\r\n"
    )
    request.drip(LISTING[:1000], DRIP_S)


def slow_end(request: Request) -> None:
    """Answer without a length: the body ends where the connection ends."""
    request.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    request.drip(LISTING, DRIP_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the patience to half a second, and have two attempts."""
    monkeypatch.setattr(s3_bodies, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(s3_bodies, "_SWEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)


def read_file(uri: str) -> None:
    with STORE.open(uri) as file:
        file.read()


PHASES: dict[str, tuple[Script, Callable[[str], object]]] = {
    "get-headers": (slow_headers, STORE.get),
    "get-body": (slow_body, STORE.get),
    "get-chunks": (slow_chunks, STORE.get),
    "get-until-the-end": (slow_end, STORE.get),
    "get-error": (slow_error, STORE.get),
    "list-headers": (slow_headers, STORE.list),
    "list-body": (slow_body, STORE.list),
    "put-answer": (slow_headers, lambda uri: STORE.put(uri, b"data")),
    "commit-answer": (slow_headers, lambda uri: STORE.put_if_absent(uri, b"data")),
    "head-headers": (slow_headers, STORE.head),
    "delete-answer": (slow_headers, STORE.delete),
    "file-description": (slow_headers, read_file),
    "file-range": (slow_range, read_file),
}


def answer_slowly(request: Request) -> None:
    """Answer at once what describes the file to be read."""
    if "quick" in request.path:
        request.answer(status="404 Not Found")
    elif request.method == "HEAD" and "file-range" in request.path:
        request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    else:
        next(script for name, (script, _) in PHASES.items() if name in request.path)(request)


def outcome_of(phase: str) -> tuple[str, float]:
    """Return the error of a phase, and the seconds until it came."""
    begin = time.monotonic()
    try:
        PHASES[phase][1](f"s3://bucket/{phase}")
    except StoreError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError(f"{phase} did not fail")


@pytest.mark.usefixtures("impatient")
def test_a_byte_now_and_then_does_not_extend_the_deadline(serve: Serve) -> None:
    """Dripped headers, bodies and answers are cut at the deadline, in each of two attempts."""
    assert s3_bodies.CHUNK_BYTES == 2**20
    serve(answer_slowly)
    with ThreadPoolExecutor(len(PHASES)) as pool:
        assert not STORE.exists("s3://bucket/quick")
        for phase, (error, seconds) in zip(PHASES, pool.map(outcome_of, PHASES), strict=True):
            assert re.search(r"cut after 0\.5\d* s .*2 attempts", error), phase
            # Each would drip for 100 s in each attempt.
            assert 2 * PATIENCE_S <= seconds < 2 * PATIENCE_S + 30, phase


def own_certificate(folder: Path) -> Path:
    """Write a key and its self-signed certificate for 127.0.0.1 into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    path = folder / "certificate.pem"
    path.write_bytes(key.private_bytes(pem, form, plain) + certificate.public_bytes(pem))
    return path


@pytest.mark.usefixtures("impatient")
def test_deadlines_hold_under_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    """Encrypted answers are read, a connection is kept, and a dripped answer is cut."""
    path = own_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(path))
    connections = set()

    def script(request: Request) -> None:
        connections.add(id(request.connection))
        if "get-body" in request.path:
            slow_body(request)
        else:
            request.answer(b"audio")

    serve(script, tls=tls)
    monkeypatch.setattr(s3_bodies, "PATIENCE_S", 30.0)
    assert [STORE.get(URI) for _ in range(5)] == [b"audio"] * 5
    assert len(connections) == 1
    monkeypatch.setattr(s3_bodies, "PATIENCE_S", PATIENCE_S)
    assert re.search(r"cut after 0\.5\d* s .*2 attempts", outcome_of("get-body")[0])


@contextmanager
def slow_handshake() -> Iterator[str]:
    """Begin TLS's handshake with the header of a long record, and drip its content."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with pytest.raises(OSError):  # noqa: PT011, PT012 - the client hangs up, or the test ends
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"\x16\x03\x03\x3f\x00")
                    with pytest.raises(OSError):  # noqa: PT011, PT012
                        while True:
                            connection.sendall(b"\x02")
                            time.sleep(DRIP_S)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.mark.usefixtures("impatient")
def test_a_dripped_handshake_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS's handshake belongs to the request."""
    monkeypatch.setattr(s3, "FIRST_CONTACT_LIMIT_S", 0.1)
    with slow_handshake() as endpoint:
        set_endpoint(endpoint, monkeypatch)
        begin = time.monotonic()
        with pytest.raises(StoreError, match=r"cut after 0\.5 s"):
            STORE.get(URI)
        assert (
            PATIENCE_S <= time.monotonic() - begin < PATIENCE_S + 30
        )  # dripped to its end: 1600 s


def test_large_objects_may_take_their_time(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """The limit grows by a second for each megabyte, of what is sent as of what is received."""
    monkeypatch.setattr(s3_bodies, "PATIENCE_S", 2.0)
    monkeypatch.setattr(s3, "CONNECT_TIMEOUT_S", 1.0)

    def answer(request: Request) -> None:
        if request.method == "GET":
            request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n")
            for _ in range(4):
                request.send(bytes(1_000_000))
                request.closing.wait(0.7)
        else:
            request.answer()

    serve(answer, receive=100_000)
    before, begin = REQUESTS.total(), time.monotonic()
    STORE.put(URI, bytes(4_000_000))
    sent = time.monotonic()
    assert STORE.get(URI) == bytes(4_000_000)
    assert min(sent - begin, time.monotonic() - sent) > s3_bodies.PATIENCE_S
    assert (REQUESTS.total() - before).retries == 0


def test_one_thread_watches_all_requests(s3_bucket: str) -> None:
    """Sixty-four GETs in flight are watched by a single thread, and leave no socket behind."""
    store, base = ObjectStore((f"s3://{s3_bucket}",)), f"s3://{s3_bucket}"
    store.put(f"{base}/x", b"x")
    for _ in store.get_many([f"{base}/x"] * 200, in_flight=64):
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("watchdog") == 1
    assert s3_bodies._WATCHDOG._watches == set()
