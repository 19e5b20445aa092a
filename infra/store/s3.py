"""Keep objects in S3: retry every transient failure within bounds, and check every answer.

A listing is the only answer of S3 without a digest, and a key that is lost from it would be lost
audio. So each page is confirmed by a second answer. Pages continue after the last key, so a store
that does not list in the order of keys is refused.

Some stores that speak S3's protocol ignore If-None-Match, or check it before they write and not as
they write, so that two attempts both commit. Some list by walking directories, so that pages lose
objects. No answer shows it, so `check_behaviour` tries all this before a run writes to the store.
"""

import base64
import hashlib
import io
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, BinaryIO, Literal, TypeVar

import boto3
from botocore.awsrequest import AWSPreparedRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from infra.prefetch import prefetch
from infra.store.objects import (
    Admit,
    Fetched,
    FetchedRange,
    Listing,
    ObjectInfo,
    RequestRefused,
    StoreError,
    admit_all,
)
from infra.store.retry import Confirmation, GaveUpError, retry
from infra.store.s3_bodies import (
    Watch,
    current_watch,
    described,
    etag_of,
    read_object,
    read_range,
    require_md5,
    required,
    watch_requests,
)
from infra.store.s3_errors import (
    OPERATIONS,
    TRANSPORT_ERRORS,
    CorruptTransferError,
    ListingFaultError,
    endpoint,
    http_status,
    is_lapsed,
    is_misconfigured,
    is_transient,
    missing_bucket,
    refusal_of,
    store_error,
)
from infra.store.s3_limits import PacedRequests, place_of, rates_of_host
from infra.store.s3_settings import s3_settings
from infra.store.uris import join_uri, split_s3
from infra.task_metrics import REQUESTS, RequestCounts


@dataclass(frozen=True, slots=True)
class Page:
    """Page holds keys in order with their sizes and ETags; an empty page precedes the first."""

    objects: tuple[tuple[str, int, str], ...] = ()
    is_last: bool = False

    @property
    def last_key(self) -> str:
        """Return the key after which the next page begins."""
        return self.objects[-1][0] if self.objects else ""

    def describe(self, bucket: str) -> Listing:
        """Describe the objects, without the empty ones that consoles make for "directories"."""
        return [
            ObjectInfo(f"s3://{bucket}/{key}", num_bytes, etag)
            for key, num_bytes, etag in self.objects
            if not key.endswith("/")
        ]


_BEFORE_SLASH = " !\"#$%&'()*+,-."
"""The printable letters before the slash: by bytes day-late/ precedes day/, by name it follows."""


def confirmed_page(client: Any, bucket: str, folder: str, start_after: str) -> Page:  # noqa: ANN401
    """List the keys after `start_after`; CorruptTransferError if two answers in a row differ.

    ListingFaultError unless the keys are in `folder` and in ascending order.
    """
    page = _ask(client, bucket, folder, start_after)
    if _ask(client, bucket, folder, start_after) != page:
        raise CorruptTransferError("two listings in a row differ (corrupt, or being written to)")
    _require_order(page, folder, start_after)
    return page


def _require_order(page: Page, folder: str, start_after: str) -> None:
    keys = [key for key, _, _ in page.objects]
    # Python compares text by code points, as S3 compares the bytes of UTF-8: the order is the same.
    for before, key in pairwise((start_after, *keys)):
        if key <= before:
            raise ListingFaultError(f"a listing out of order, with {key!r} after {before!r},")
        if not key.startswith(folder):
            raise ListingFaultError(f"a listing of {folder!r} with {key!r}")
    if not keys and not page.is_last:
        raise ListingFaultError(f"a listing with more pages that does not pass {start_after!r},")


def names_before(folder: str, last_key: str) -> list[str]:
    """Return the prefixes of keys that a walk of directories lists only after `last_key`.

    It lists day-late/ after day/. Where a page ends within day/, a store that walks, and resumes
    by comparing keys, takes all of day-late/ for listed before; yet each page is in order.
    """
    names = last_key.removeprefix(folder).split("/")
    inside = [folder + "/".join(names[:depth]) for depth in range(1, len(names))]
    return [f"{each}{letter}" for each in inside for letter in _BEFORE_SLASH]


def require_order_at(client: Any, bucket: str, folder: str, prefix: str) -> None:  # noqa: ANN401
    """Raise ListingFaultError if the folder's listing does not come to keys that are there."""
    if not (there := _ask(client, bucket, prefix, "")).objects:
        return
    # A listing that begins before them begins with one of them.
    first = _ask(client, bucket, folder, prefix[:-1]).objects[:1]
    if not first or first[0][0] > there.last_key:
        raise ListingFaultError(f"a listing out of order, without {there.last_key!r},")


def _ask(client: Any, bucket: str, folder: str, start_after: str) -> Page:  # noqa: ANN401
    # By key, not by continuation token: a corrupt token might skip keys.
    after = {"StartAfter": start_after} if start_after else {}
    answer = client.list_objects_v2(Bucket=bucket, Prefix=folder, **after)
    contents = answer.get("Contents", [])
    objects = tuple(
        (required(each, "Key"), required(each, "Size"), etag_of(each)) for each in contents
    )
    return Page(objects, not required(answer, "IsTruncated"))


NAMES = ("B", "a-b", "a/b")
"""In the order of bytes. Where directories are walked, a/b comes first, and B last without case."""

_TEXT = b"megahour writes this object to find out whether the store refuses a second write of it.\n"
_SUITABLE = "such as AWS S3 or Ceph"

NUM_RACES, NUM_WRITERS = 8, 8
"""So often, so many write a new object at once: in one race in five Swift has a single winner."""


def check_behaviour(store: "S3Store", folder: str) -> None:
    """Write a few objects below `folder`; StoreError names what the store does not do.

    It must take one of several conditional writes that come at once, refuse one that comes later,
    and list what was written in the order of keys. The objects stay, so that a later check writes
    nothing, and no right to delete is needed.
    """
    uris = [join_uri(folder, name) for name in NAMES]
    if _not_listed(store, folder, uris):
        _require_single_winners(store, join_uri(folder, "race"))
        for uri in uris:
            _write_once(store, uri)
        if absent := _not_listed(store, folder, uris):
            raise StoreError(
                f"{folder}: a listing by the store at {endpoint()} lacks {absent[0]}, which was "
                "written before, and so would lose speech: use a store whose listings hold all "
                f"that was written, {_SUITABLE}"
            )
    # The store may be another version of the one that an earlier check wrote to.
    if _write_once(store, uris[0]):
        raise _unsuitable(uris[0], f"at {endpoint()} ignores them: it took a second write")


def _require_single_winners(store: "S3Store", folder: str) -> None:
    """Let several writers write each new object; StoreError if in two races more than one wins."""
    shared = 0
    for _ in range(NUM_RACES):
        uri = join_uri(folder, uuid.uuid4().hex)
        writes = prefetch(
            lambda _, uri=uri: _write_once(store, uri), range(NUM_WRITERS), NUM_WRITERS
        )
        num_winners = sum(is_ours for _, is_ours in writes)
        shared += num_winners > 1
        # moto, on which users try things out, has two winners in one race of 750.
        if shared == 2:
            won = f"{num_winners} of {NUM_WRITERS} writes of one object at once"
            raise _unsuitable(uri, f"at {endpoint()} does not keep them apart: it took {won}")


def _write_once(store: "S3Store", uri: str) -> bool:
    """Write the object unless there is one; StoreError where the store refuses the condition."""
    try:
        return store.put_if_absent(uri, _TEXT)
    except RequestRefused as error:
        store.put(uri, _TEXT)  # raises where it is not the condition that is refused
        raise _unsuitable(uri, f"refuses them: {error.answer}") from error


def _unsuitable(uri: str, what: str) -> StoreError:
    return StoreError(
        f"{uri}: need conditional writes (PUT with If-None-Match), without which two attempts at a "
        f"task could both commit; the store {what}: use a store, or a version of it, that answers "
        f"412 to all but one, {_SUITABLE}"
    )


def _not_listed(store: "S3Store", folder: str, uris: list[str]) -> list[str]:
    listed = {found.uri for found in store.list_each(folder)}
    return [uri for uri in uris if uri not in listed]


R = TypeVar("R")

MAX_CONNECTIONS = 64
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
FIRST_CONTACT_LIMIT_S = 20.0
_RANGE_NOT_SATISFIABLE = 416
_DIRECTORY_BUCKET = "--x-s3"
"""The end of the name of each bucket in S3 Express One Zone, and of no other."""


class S3Store:
    """S3Store is the S3 half of ObjectStore, configured by the standard AWS chain.

    Transient failures and corrupt bodies are retried as in `retry`, with a fresh session where
    credentials have lapsed. Absence and denial are asked for again by a `Confirmation`; other
    errors are raised at once. The caller sees a StoreError with a remedy.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._making_client = threading.Lock()
        self._reached_buckets: set[str] = set()
        self._is_checked = False
        self._rates = rates_of_host()

    def get(self, uri: str) -> bytes:
        """Read the whole object, as `fetch` does."""
        return self.fetch(uri, admit_all).data

    def fetch(self, uri: str, admit: Admit) -> Fetched:
        """Read the whole object, and compare its bytes with its ETag where that is an MD5."""

        def attempt(client: Any, address: dict[str, str]) -> Fetched:  # noqa: ANN401
            answer = client.get_object(**address)
            with closing(answer["Body"]):
                return read_object(answer, admit)

        return self._perform(uri, attempt)

    def fetch_range(self, uri: str, start: int, num_bytes: int) -> FetchedRange:
        """Read some bytes of the object."""

        def attempt(client: Any, address: dict[str, str]) -> FetchedRange | None:  # noqa: ANN401
            try:
                answer = client.get_object(
                    **address, Range=f"bytes={start}-{start + num_bytes - 1}"
                )
            except ClientError as error:
                if http_status(error) != _RANGE_NOT_SATISFIABLE:
                    raise
                return None
            with closing(answer["Body"]):
                return read_range(answer, start, num_bytes)

        if (found := self._perform(uri, attempt)) is not None:
            return found
        info = self.head(uri)  # the range begins past the object's end
        return FetchedRange(b"", info.num_bytes, info.etag)

    def put(self, uri: str, data: bytes) -> None:
        """Write the object or replace it."""
        digest = hashlib.md5(data, usedforsecurity=False)
        self._perform(uri, lambda client, address: _put(client, address, data, digest), "write")

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        """Write the object unless there is one; return whether we wrote it."""
        digest = hashlib.md5(data, usedforsecurity=False)

        def attempt(client: Any, address: dict[str, str]) -> Literal["ours", "damaged", "theirs"]:  # noqa: ANN401
            try:
                _put(client, address, data, digest, IfNoneMatch="*")
            except ClientError as error:
                if http_status(error) != 412:
                    raise
                return "theirs"
            except CorruptTransferError:
                return "damaged"
            return "ours"

        written = self._perform(uri, attempt, "write")
        if written == "damaged":
            REQUESTS.add(RequestCounts(retries=1))
            self.put(uri, data)
        return written != "theirs"

    def head(self, uri: str) -> ObjectInfo:
        """Describe the object without reading it."""
        return self._perform(
            uri, lambda client, address: described(uri, client.head_object(**address))
        )

    def list_each(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects of a page, then of the next; each is asked for until two answers agree.

        A store that was not checked is asked for keys that the next page would not reach.
        """
        bucket, folder = _listed_folder(prefix)
        page, asked = Page(), set[str]()
        while not page.is_last:
            page = self._ask_of(confirmed_page, prefix, page.last_key)
            if not page.is_last and not self._is_checked:
                for name in names_before(folder, page.last_key):
                    if name not in asked:
                        self._ask_of(require_order_at, prefix, name)
                        asked.add(name)
            yield from page.describe(bucket)

    def _ask_of(self, question: Callable[[Any, str, str, str], R], prefix: str, key: str) -> R:
        """Ask a question about the listing of a prefix, with retries."""
        bucket, folder = _listed_folder(prefix)
        return self._perform(prefix, lambda client, _: question(client, bucket, folder, key))

    def open(self, uri: str) -> BinaryIO:
        """Open the object for reading and seeking, in blocks of 8 MB."""
        from infra.store.s3_file import S3File  # noqa: PLC0415

        file: BinaryIO = S3File(self.head(uri), self._perform)
        return file

    def check(self, folder: str) -> None:
        """Raise StoreError unless the store refuses a second conditional write and lists by key."""
        check_behaviour(self, folder)
        self._is_checked = True

    def delete(self, uri: str) -> None:
        """Remove the object, if it is there."""
        self._perform(uri, lambda client, address: client.delete_object(**address), "write")

    def leftovers(self, prefix: str) -> Listing:
        """Return no objects, as a PUT that breaks off leaves none."""
        del prefix
        return []

    def _perform(
        self, uri: str, attempt: Callable[[Any, dict[str, str]], R], kind: str = "read"
    ) -> R:
        bucket, key = split_s3(uri)
        address = {"Bucket": bucket, "Key": key}
        try:
            self._reach(bucket)
            paced = PacedRequests(self._rates, place_of(kind, bucket, key))
            ask = partial(self._ask, paced, "_client", lambda client: attempt(client, address))
            confirm = Confirmation(refusal_of)
            return retry(lambda: confirm(ask), is_transient, patience=paced)
        except GaveUpError as error:
            raise store_error(error.last, uri, str(error)) from error
        except TRANSPORT_ERRORS as error:
            raise store_error(error, uri) from error

    def _ask(self, paced: PacedRequests, name: str, attempt: Callable[[Any], R]) -> R:
        """Send one request by the client with this name; forget the client if its token lapsed."""
        client = None
        try:
            client = getattr(self, name)
            return paced.send(client.meta.endpoint_url, lambda: _watched(lambda: attempt(client)))
        except (BotoCoreError, ClientError) as error:
            if is_lapsed(error):
                self._forget(client)
            raise

    def _forget(self, lapsed: object) -> None:
        """Let the next request read the credentials again, unless another thread saw to it."""
        with self._making_client:
            names = ("_client", "_first_client")
            if lapsed is None or any(self.__dict__.get(name) is lapsed for name in names):
                self._session = None
                for name in names:
                    self.__dict__.pop(name, None)

    def _reach(self, bucket: str) -> None:
        # Once per process: report a wrong endpoint or bucket at once, not after many attempts.
        if bucket in self._reached_buckets:
            return
        if bucket.endswith(_DIRECTORY_BUCKET):
            raise ListingFaultError("a directory bucket, which is not listed in the order of keys,")

        paced = PacedRequests(self._rates, place_of("read", bucket, ""))
        confirm = Confirmation(lambda error: refusal_of(error) if _is_missing(error) else 0)

        def attempt() -> None:
            ask = partial(
                self._ask, paced, "_first_client", lambda it: it.head_bucket(Bucket=bucket)
            )
            try:
                confirm(ask)
            except ClientError as error:
                if _is_missing(error):
                    raise missing_bucket(bucket, f"s3://{bucket}") from error
                # 400, 403: permissions may be limited to a prefix; the request itself will show.
                if is_transient(error) and http_status(error) != 400:
                    raise

        def may_pass(error: Exception) -> bool:
            return is_transient(error) and not is_misconfigured(error)

        retry(attempt, may_pass, limit_s=FIRST_CONTACT_LIMIT_S, patience=paced)
        self._reached_buckets.add(bucket)

    @cached_property
    def _client(self) -> Any:  # noqa: ANN401 - boto3 makes clients' classes at run time
        return self._make_client(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)

    @cached_property
    def _first_client(self) -> Any:  # noqa: ANN401
        return self._make_client(CONNECT_TIMEOUT_S / 2, READ_TIMEOUT_S / 4)

    def _make_client(self, connect_timeout_s: float, read_timeout_s: float) -> Any:  # noqa: ANN401
        with self._making_client:  # a session's client factory is not thread-safe
            self._session = self._session or boto3.session.Session()
            settings = s3_settings()
            config = Config(
                **settings.config,
                # infra/store/retry.py retries; also broken bodies, conflicts and corruption.
                retries={"mode": "standard", "total_max_attempts": 1},
                connect_timeout=connect_timeout_s,
                read_timeout=read_timeout_s,
                max_pool_connections=MAX_CONNECTIONS,
            )
            region = settings.default_region or None
            try:
                client = self._session.client("s3", region_name=region, config=config)
            except BotoCoreError:  # some of them are ValueErrors
                raise
            except ValueError as error:  # its text is the URL, which may hold a password
                need = "need a URL, such as http://localhost:9000 or https://s3.example.org"
                raise StoreError(f"AWS_ENDPOINT_URL: {need}") from error
        watch_requests(client)
        client.meta.events.register("before-send.s3", _begin_request)
        client.meta.events.register_last("before-parameter-build.s3", _follow_no_head)
        if payer := settings.request_payer:
            client.meta.events.register(
                "before-parameter-build.s3", partial(_name_payer, payer=payer)
            )
        return client


def _listed_folder(prefix: str) -> tuple[str, str]:
    bucket, key = split_s3(prefix)
    return bucket, f"{key}/" if key else ""


def _is_missing(error: Exception) -> bool:
    return isinstance(error, ClientError) and http_status(error) == 404


def _watched(attempt: Callable[[], R]) -> R:
    """Call `attempt` under a watch; an answer that botocore or we cannot read is a corrupt one."""
    with Watch():
        try:
            return attempt()
        except BotoCoreError:  # some of them are ValueErrors
            raise
        # botocore translates most of urllib3's errors; not those within the body of a GET's error,
        # nor TLS's within any body.
        except HTTPError as error:
            raise CorruptTransferError(f"the body broke off: {type(error).__name__}") from error
        except (KeyError, ValueError) as error:
            raise CorruptTransferError(f"an answer that cannot be read ({error!r:.80})") from error


def _follow_no_head(model: Any, context: dict[str, Any], **_: object) -> None:  # noqa: ANN401
    # botocore asks for a redirected bucket's region by a HEAD, and would do so for that HEAD's
    # redirect without an end.
    if model.name == "HeadBucket":
        context["s3_redirect"]["redirected"] = True


def _name_payer(model: Any, params: dict[str, Any], payer: str, **_: object) -> None:  # noqa: ANN401
    if "RequestPayer" in model.input_shape.members:  # HeadBucket has no payer
        params["RequestPayer"] = payer


def _begin_request(event_name: str, request: AWSPreparedRequest, **_: object) -> None:
    REQUESTS.add(OPERATIONS[event_name.rpartition(".")[2]])
    headers: Mapping[str, Any] = request.headers
    if (watch := current_watch()) is not None:
        watch.begin(int(headers.get("Content-Length", 0)))


def _put(client: Any, address: dict[str, str], data: bytes, digest: Any, **condition: str) -> None:  # noqa: ANN401
    REQUESTS.add(RequestCounts(bytes_sent=len(data)))
    sent = {"Body": io.BytesIO(data), "ContentMD5": base64.b64encode(digest.digest()).decode()}
    require_md5(client.put_object(**address, **sent, **condition), digest.hexdigest())


_S3_STORES: dict[tuple[object, ...], S3Store] = {}


def s3_store() -> S3Store:
    """Return the store of this process and environment; connections do not survive a fork."""
    key = (os.getpid(), *sorted(each for each in os.environ.items() if each[0].startswith("AWS_")))
    return _S3_STORES.get(key) or _S3_STORES.setdefault(key, S3Store())
