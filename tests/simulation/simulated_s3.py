"""An S3 in memory below the real store: boto3's HTTP requests come here and wait for an answer."""

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import md5
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.client import BaseClient
from botocore.exceptions import ReadTimeoutError
from botocore.httpsession import URLLib3Session
from botocore.response import StreamingBody

from infra.store import retry
from infra.store.object_store import Fetched, ObjectInfo, ObjectStore, StoreError
from infra.store.s3_limits import SharedRates
from tests.simulation.replayed_code import Call, Outcome, ask, outcome_of

BUCKET = "simulated"
ENDPOINT = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request; `prefix` and `after` are those of a LIST."""

    method: str
    key: str
    body: bytes = b""
    if_absent: bool = False
    prefix: str = ""
    after: str = ""

    def __str__(self) -> str:
        condition = " if absent" if self.if_absent else ""
        return f"{self.method} {self.key or self.prefix}{condition}"


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer; status 0 stands for none at all."""

    status: int
    body: bytes = b""
    etag: str = ""


UNAVAILABLE = Outcome(Answer(503, b"<Error><Code>SlowDown</Code></Error>"))
NO_ANSWER = Outcome(Answer(0))
ABSENT = Outcome(Answer(404, b"<Error><Code>NoSuchKey</Code></Error>"))
PRESENT = Outcome(Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>"))

Objects = dict[str, bytes]


def perform(objects: Objects, request: Request) -> tuple[Objects, Outcome]:
    """Return the objects after a request, and the answer to it, as S3 defines them."""
    if request.method == "LIST":
        return objects, Outcome(Answer(200, _listing(objects, request)))
    there = objects.get(request.key)
    if request.method == "PUT":
        if request.if_absent and there is not None:
            return objects, PRESENT
        return {**objects, request.key: request.body}, Outcome(
            Answer(200, etag=_etag(request.body))
        )
    if request.method == "DELETE":
        left = {key: data for key, data in objects.items() if key != request.key}
        return left, Outcome(Answer(204))
    if there is None:
        return objects, ABSENT
    return objects, Outcome(Answer(200, there, _etag(there)))


def altered(answer: Outcome) -> Outcome:
    """Flip a bit of an object's last digit on its way; its ETag is that of a multipart upload."""
    data = bytearray(answer.value.body)
    places = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    if answer.value.status != 200 or not places:
        return answer
    data[places[-1]] ^= 1
    return Outcome(Answer(200, bytes(data), f"{_etag(bytes(data))}-1"))


def _etag(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()


def _listing(objects: Objects, request: Request) -> bytes:
    contents = "".join(
        f'<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>"{_etag(data)}"</ETag>'
        "</Contents>"
        for key, data in sorted(objects.items())
        if key.startswith(request.prefix) and key > request.after
    )
    return (
        f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{contents}"
        "</ListBucketResult>"
    ).encode()


class _Body(io.BytesIO):
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


class _Network:
    """_Network stands for the network below boto3: each request is a call that waits there.

    Building a request and reading its answer takes boto3 1 ms, so that it does each once only.
    """

    def __init__(self) -> None:
        self._requests: dict[Any, Request] = {}
        self._parsed: dict[Any, Outcome] = {}
        self._made: Any = None
        self._answer: Answer | None = None

    def api_call(self, client: BaseClient, operation: str, parameters: dict[str, Any]) -> Any:
        """Stand for BaseClient._make_api_call."""
        if operation == "HeadBucket":  # the store's first contact with a bucket
            return {}
        made = operation, *((name, _plain(parameters[name])) for name in sorted(parameters))
        self._made = made
        if made not in self._requests:
            return _make_api_call(client, operation, parameters)
        answer = _answer_to(self._requests[made])
        if (made, answer) not in self._parsed:
            self._answer = answer
            self._parsed[made, answer] = outcome_of(
                lambda: _make_api_call(client, operation, parameters)
            )
        parsed = self._parsed[made, answer]
        if parsed.error is not None:
            raise parsed.error.with_traceback(None)
        body = {"Body": StreamingBody(_Body(answer.body), len(answer.body))}
        return {**parsed.value, **(body if "Body" in parsed.value else {})}

    def send(self, prepared: AWSPreparedRequest) -> AWSResponse:
        """Stand for URLLib3Session.send."""
        request = self._requests[self._made] = _request(prepared)
        answer, self._answer = self._answer or _answer_to(request), None
        if not answer.status:
            raise ReadTimeoutError(endpoint_url=prepared.url)
        headers = {"Content-Length": str(len(answer.body)), "ETag": f'"{answer.etag}"'}
        body = b"" if prepared.method == "HEAD" else answer.body
        return AWSResponse(prepared.url, answer.status, headers, _Body(body))


_make_api_call = BaseClient._make_api_call


def _answer_to(request: Request) -> Answer:
    answer: Answer = ask(Call("http", str(request), (request,)))
    return answer


def _plain(value: Any) -> Any:
    """Return a parameter of a boto3 call as it can be compared; a body is left unread."""
    if not hasattr(value, "read"):
        return value
    data = value.read()
    value.seek(0)
    return data


def _request(prepared: AWSPreparedRequest) -> Request:
    parts = urlsplit(prepared.url)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = dict(parse_qsl(parts.query))
    assert bucket == BUCKET, f"a request for {prepared.url}"
    if "list-type" in query:
        return Request("LIST", "", prefix=query["prefix"], after=query.get("start-after", ""))
    body = _plain(prepared.body or b"")
    return Request(prepared.method, key, bytes(body), "If-None-Match" in prepared.headers)


@contextmanager
def simulated_network(num_asks: int = 1) -> Iterator[None]:
    """Let all requests of boto3 in this process wait for the simulation, and none for time.

    The store asks `num_asks` times before it believes that an object is absent. One is enough
    where the server does not err: the last time of several is like a single one.
    """
    network = _Network()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(URLLib3Session, "send", lambda _, prepared: network.send(prepared))
        patch.setattr(BaseClient, "_make_api_call", lambda *call: network.api_call(*call))  # noqa: PLW0108
        patch.setattr(retry, "MAX_ASKS", num_asks)
        # Even a sleep of no time at all gives the processor away, for 3 ms where others want it.
        patch.setattr(
            retry, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
        )
        # A simulated 503 must not slow this host's real processes, nor they the simulation.
        patch.setattr(SharedRates, "wait_for_turn", lambda *_: 0.0)
        patch.setattr(SharedRates, "count_answer", lambda *_, **__: None)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "simulated")
        patch.setenv("AWS_ENDPOINT_URL", ENDPOINT)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield


class SimulatedStore(ObjectStore):
    """A store whose every operation is a call: the code that uses it waits there.

    The real operation then runs as code of its own, which waits at every request.
    """

    def get(self, uri: str) -> bytes:
        return self._ask("get", uri)

    def fetch(self, uri: str, *_: Any) -> Fetched:
        return self._ask("fetch", uri)

    def put(self, uri: str, data: bytes) -> None:
        self._ask("put", uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        return self._ask("put_if_absent", uri, data)

    def head(self, uri: str) -> ObjectInfo:
        return self._ask("head", uri)

    def list(self, prefix: str) -> Any:
        return self._ask("list", prefix)

    def list_each(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self.list(prefix))

    def delete(self, uri: str) -> None:
        self._ask("delete", uri)

    def check(self, folder: str) -> None:
        self._ask("check", folder)

    def get_many(self, uris: Sequence[str], *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Read the objects one after the other: threads would make the order of calls chance."""
        for uri in uris:
            try:
                yield uri, self.fetch(uri)
            except StoreError as error:
                yield uri, error

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ask(Call("store", f"{name} {arguments[0]}", (name, *arguments)))


def real_operation(call: Call) -> Any:
    """Perform a call of a SimulatedStore by the real store, which sends requests."""
    name, *arguments = call.arguments
    return getattr(ObjectStore((f"s3://{BUCKET}",)), name)(*arguments)
