"""Answers that lack headers or fields are read where they are whole, or named."""

import hashlib

import pytest

from infra.store import retry
from infra.store.object_store import (
    Fetched,
    ObjectDenied,
    ObjectNotFound,
    ObjectStore,
    ObjectTooLarge,
    SizeBound,
    StoreError,
)
from tests.faults.failing_store.scripted_server import Request, Serve

URI = "s3://bucket/x"
STORE = ObjectStore(("s3://bucket",))
DATA = bytes(range(256)) * 10_000  # 2.5 chunks of the reader
MD5 = hashlib.md5(DATA).hexdigest()


def chunks(data: bytes, size: int) -> bytes:
    """Frame the data in chunks of `size`, without the end."""
    pieces = [data[first : first + size] for first in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%s\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\n%s\r\n"
ETAG = b'ETag: "%s"\r\n' % MD5.encode()
END = b"0\r\n\r\n"

WHOLE = {
    "chunks": CHUNKED % ETAG + chunks(DATA, 70_000) + END,
    "chunks without an ETag": CHUNKED % b"" + chunks(DATA, 70_000) + END,
    "until the connection ends": CLOSING % ETAG + DATA,
    "ETag of several parts": CHUNKED % b'ETag: "abc-2"\r\n' + chunks(DATA, 3_000_000) + END,
}
BROKEN = {
    "a cut chunk": (CHUNKED % b"" + chunks(DATA, 70_000)[:-100], "Error"),
    "no last chunk": (CHUNKED % b"" + chunks(DATA, 70_000), "Error"),
    "no chunk at all": (CHUNKED % b"", "Error"),
    "an end that nothing proves": (CLOSING % b"" + DATA, "neither a Content-Length nor an MD5"),
    "another MD5": (CLOSING % ETAG + DATA[:-1], f"ETag says {MD5}"),
    "a date that is none": (b"HTTP/1.1 200 OK\r\nLast-Modified: x\r\n\r\n", "cannot be read"),
    "a count that is none": (
        b"HTTP/1.1 200 OK\r\nx-amz-mp-parts-count: x\r\n\r\n",
        "cannot be read",
    ),
}


@pytest.fixture
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)


def raw(data: bytes):
    """Send `data` as the answer, and hang up."""

    def script(request: Request) -> None:
        request.send(data)
        request.hang_up()

    return script


@pytest.mark.usefixtures("two_attempts")
@pytest.mark.parametrize("answer", WHOLE)
def test_whole_answers_are_read(answer: str, serve: Serve) -> None:
    """An answer in chunks, or without an ETag, gives the same bytes and the same MD5."""
    serve(raw(WHOLE[answer]))
    assert STORE.fetch(URI) == Fetched(DATA, MD5)


@pytest.mark.usefixtures("two_attempts")
@pytest.mark.parametrize("answer", BROKEN)
def test_broken_answers_are_not_taken(answer: str, serve: Serve) -> None:
    """An answer that breaks off, or may have, is asked for again, and then named."""
    data, message = BROKEN[answer]
    serve(raw(data))
    with pytest.raises(StoreError, match=rf"{URI}: .*{message}.* at 127.*check .*2 attempts"):
        STORE.fetch(URI)


ERROR = b"<Error><Code>%s</Code><Message>as asked</Message></Error>"
REFUSED = [
    ("404 Not Found", b"NoSuchKey", ObjectNotFound),
    ("403 X", b"AccessDenied", ObjectDenied),
]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize(("status", "code", "error"), REFUSED)
def test_an_error_that_breaks_off_is_asked_for_again(
    status: str,
    code: bytes,
    error: type[StoreError],
    every: int,
    monkeypatch: pytest.MonkeyPatch,
    serve: Serve,
) -> None:
    """Each second or third body of an error ends early, and the whole ones are believed."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)
    body, num_sent = ERROR % code, 0

    def script(request: Request) -> None:
        nonlocal num_sent
        num_sent += 1
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        is_broken = num_sent % every == 1
        request.send(head + body[: len(body) // 2 if is_broken else None])
        if is_broken:
            request.hang_up()

    serve(script)
    with pytest.raises(error, match=URI):
        STORE.get(URI)


@pytest.mark.usefixtures("two_attempts")
@pytest.mark.parametrize("status", ["403 X", "404 X", "500 X"])
def test_errors_that_all_break_off_are_named(status: str, serve: Serve) -> None:
    """An error of this software, with a remedy, whatever the status."""
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 99\r\n\r\n<Error>".encode()
    serve(raw(answer))
    for ask in (STORE.get, STORE.list):
        with pytest.raises(StoreError, match=rf"{URI}: .*(check|try again)"):
            ask(URI)


PAGE = "<ListBucketResult>%s</ListBucketResult>"
ENTRY = "<Contents>%s</Contents><IsTruncated>false</IsTruncated>"
INCOMPLETE = {
    "IsTruncated": PAGE % "",
    "Size": PAGE % ENTRY % "<Key>run/a</Key><ETag>x</ETag>",
    "Key": PAGE % ENTRY % "<Size>1</Size><ETag>x</ETag>",
}


@pytest.mark.usefixtures("two_attempts")
@pytest.mark.parametrize("field", INCOMPLETE)
def test_incomplete_listings_are_named(field: str, serve: Serve) -> None:
    """A listing without a field is an error with a remedy, not a KeyError."""
    serve(lambda request: request.answer(INCOMPLETE[field].encode()))
    with pytest.raises(StoreError, match=rf"run: an answer .*{field}.* at 127.*check .*proxies"):
        STORE.list("s3://bucket/run")


@pytest.mark.usefixtures("two_attempts")
def test_listings_without_etags_are_read(serve: Serve) -> None:
    """A listing needs keys and sizes alone."""
    page = PAGE % ENTRY % "<Key>run/a</Key><Size>3</Size>"
    serve(lambda request: request.answer(page.encode()))
    assert [(info.uri, info.num_bytes) for info in STORE.list("s3://bucket/run")] == [
        ("s3://bucket/run/a", 3)
    ]


@pytest.mark.usefixtures("two_attempts")
def test_an_object_without_a_size_is_named(serve: Serve) -> None:
    """A HEAD without Content-Length cannot describe its object."""
    serve(lambda request: request.send(CHUNKED % b""))
    for describe in (STORE.head, STORE.open):
        with pytest.raises(StoreError, match=rf"{URI}: an answer without ContentLength at"):
            describe(URI)


@pytest.mark.usefixtures("two_attempts")
def test_an_endless_answer_is_refused_at_its_bound(serve: Serve) -> None:
    """Chunks without an end are read up to the object's bound, and a little."""
    sent = 0

    def script(request: Request) -> None:
        nonlocal sent
        request.send(CHUNKED % b"")
        while True:
            request.send(chunks(bytes(2**20), 2**20))
            sent += 2**20

    serve(script)
    [(_, found)] = STORE.get_many([URI], 4, [SizeBound(max_bytes=5 * 2**20)])
    assert isinstance(found, ObjectTooLarge)
    assert sent < 30 * 2**20  # the buffers of both sides
