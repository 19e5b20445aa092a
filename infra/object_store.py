"""Objects by URI, in S3 or on local paths; the only module that knows S3."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

import boto3
import s3fs
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
)

from infra.local_store import LocalStore
from infra.look_ahead import look_ahead
from infra.objects import (
    AccessDenied,
    Fetched,
    Listing,
    ObjectInfo,
    ObjectNotFound,
    PrefixError,
    StoreError,
)
from infra.uris import is_s3, join_uri, normalize_uri, require_within, resolve_prefix, split_s3

__all__ = [
    "AccessDenied",
    "Fetched",
    "ObjectInfo",
    "ObjectNotFound",
    "ObjectStore",
    "PrefixError",
    "StoreError",
    "join_uri",
    "normalize_uri",
]

MAX_IN_FLIGHT = 64
_MAX_ATTEMPTS = 5
_BLOCK_BYTES = 8 * 2**20
_CREDENTIAL_ERRORS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_DENIED_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}


class _Backend(Protocol):
    def fetch(self, uri: str) -> Fetched: ...
    def put(self, uri: str, data: bytes) -> None: ...
    def put_if_absent(self, uri: str, data: bytes) -> bool: ...
    def head(self, uri: str) -> ObjectInfo: ...
    def list(self, prefix: str) -> Listing: ...
    def open(self, uri: str) -> BinaryIO: ...


@dataclass(frozen=True)
class ObjectStore:
    """Whole objects at `s3://bucket/key` or local paths, all within `allowed_prefixes`.

    Picklable and safe to share between threads; clients are made per process when first needed.
    A URI elsewhere, with `..`, or a symlink that leads elsewhere, raises PrefixError.
    """

    allowed_prefixes: tuple[str, ...]

    def __post_init__(self) -> None:
        # Resolved once, here: a worker's working directory need not be ours.
        resolved = tuple(resolve_prefix(prefix) for prefix in self.allowed_prefixes)
        object.__setattr__(self, "allowed_prefixes", resolved)

    def get(self, uri: str) -> bytes:
        """Read the whole object; raise ObjectNotFound, AccessDenied or StoreError."""
        return self.fetch(uri).data

    def fetch(self, uri: str) -> Fetched:
        """Read the whole object with its ETag; raise as `get` does."""
        backend, uri = self._route(uri)
        return backend.fetch(uri)

    def put(self, uri: str, data: bytes) -> None:
        """Write the object, replacing what was there; readers see the old bytes or the new."""
        backend, uri = self._route(uri)
        backend.put(uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        """Write the object unless there is one already, and say whether we wrote it.

        Of several writers at once exactly one wins. False may also follow our own write whose
        answer was lost and whose request was repeated: read the object and compare.
        """
        backend, uri = self._route(uri)
        return backend.put_if_absent(uri, data)

    def head(self, uri: str) -> ObjectInfo:
        """Describe the object without reading it; raise ObjectNotFound if there is none."""
        backend, uri = self._route(uri)
        return backend.head(uri)

    def exists(self, uri: str) -> bool:
        """Whether there is an object at `uri`; a missing bucket raises StoreError instead."""
        try:
            self.head(uri)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str) -> Listing:
        """Describe all objects below `prefix/`, at any depth, sorted by URI; [] if none."""
        backend, prefix = self._route(prefix)
        return backend.list(prefix)

    def get_many(
        self, uris: Sequence[str], in_flight: int = 32
    ) -> Iterator[tuple[str, Fetched | StoreError]]:
        """Read objects in the order of `uris`, up to `in_flight` at a time and ahead of the reader.

        An object that cannot be read comes as its error, and the others still come.
        """
        if not 1 <= in_flight <= MAX_IN_FLIGHT:
            raise ValueError(f"in_flight = {in_flight}: need 1..{MAX_IN_FLIGHT}, our connections")
        return look_ahead(self._fetch_or_error, uris, in_flight)

    def open(self, uri: str) -> BinaryIO:
        """Open the object for reading and seeking; from S3, in blocks of 8 MB."""
        backend, uri = self._route(uri)
        return backend.open(uri)

    def _fetch_or_error(self, uri: str) -> Fetched | StoreError:
        try:
            return self.fetch(uri)
        except StoreError as error:
            return error

    def _route(self, uri: str) -> tuple[_Backend, str]:
        normalized = require_within(uri, self.allowed_prefixes)
        return (_s3_store() if is_s3(normalized) else LocalStore()), normalized


class _S3Store:
    """The S3 half of ObjectStore; endpoint, region and credentials by the standard AWS chain."""

    def __init__(self) -> None:
        self._session = boto3.session.Session()
        self._making_client = threading.Lock()
        self._reached_buckets: set[str] = set()

    def fetch(self, uri: str) -> Fetched:
        with self._request(uri) as (client, address):
            for _ in range(_MAX_ATTEMPTS - 1):
                try:
                    return _read(client.get_object(**address))
                except BotoCoreError:  # botocore repeats requests, not broken bodies
                    continue
            return _read(client.get_object(**address))

    def put(self, uri: str, data: bytes) -> None:
        with self._request(uri) as (client, address):
            client.put_object(**address, Body=data)

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        with self._request(uri) as (client, address):
            for _ in range(_MAX_ATTEMPTS):
                try:
                    client.put_object(**address, Body=data, IfNoneMatch="*")
                except ClientError as error:
                    status = _status(error)
                    if status == 412:
                        return False
                    if status != 409:
                        raise
                else:
                    return True
        # 409: another write or delete was under way, which need not have left an object.
        raise StoreError(f"{uri}: {_MAX_ATTEMPTS} conflicting writes in a row: try again later")

    def head(self, uri: str) -> ObjectInfo:
        with self._request(uri) as (client, address):
            answer = client.head_object(**address)
        return ObjectInfo(uri, answer["ContentLength"], answer["ETag"].strip('"'))

    def list(self, prefix: str) -> Listing:
        bucket, key = split_s3(prefix)
        with self._request(prefix) as (client, _):
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=f"{key}/" if key else ""
            )
            found = [
                ObjectInfo(f"s3://{bucket}/{item['Key']}", item["Size"], item["ETag"].strip('"'))
                for page in pages
                for item in page.get("Contents", [])
                if not item["Key"].endswith("/")  # consoles make such objects for "directories"
            ]
        return sorted(found, key=lambda info: info.uri)

    def open(self, uri: str) -> BinaryIO:
        self.head(uri)  # for its errors, which s3fs would name otherwise
        filesystem = s3fs.S3FileSystem(
            skip_instance_cache=True,  # its key leaves out the environment
            default_block_size=_BLOCK_BYTES,
            config_kwargs={"connect_timeout": 5, "read_timeout": 60},
        )
        file: BinaryIO = filesystem.open(uri, "rb")
        return file

    @contextmanager
    def _request(self, uri: str) -> Iterator[tuple[Any, dict[str, str]]]:
        bucket, key = split_s3(uri)
        try:
            self._reach(bucket)
            yield self._client, {"Bucket": bucket, "Key": key}
        except (BotoCoreError, ClientError) as error:
            raise _store_error(error, uri) from error

    @cached_property
    def _client(self) -> Any:  # noqa: ANN401 - boto3 makes clients' classes at run time
        return self._make_client(_MAX_ATTEMPTS, connect_timeout_s=5, read_timeout_s=60)

    def _reach(self, bucket: str) -> None:
        # With few attempts, so that a wrong endpoint or bucket is told at once, not in 15 s.
        if bucket in self._reached_buckets:
            return
        client = self._make_client(2, connect_timeout_s=3, read_timeout_s=10)
        try:
            client.head_bucket(Bucket=bucket)
        except ClientError as error:
            # 403: permissions may end at a prefix; the request itself will tell.
            if _status(error) == 404:
                raise _missing_bucket(bucket, f"s3://{bucket}") from error
        self._reached_buckets.add(bucket)

    def _make_client(
        self, max_attempts: int, connect_timeout_s: float, read_timeout_s: float
    ) -> Any:  # noqa: ANN401
        config = Config(
            retries={"mode": "standard", "total_max_attempts": max_attempts},
            connect_timeout=connect_timeout_s,
            read_timeout=read_timeout_s,
            max_pool_connections=MAX_IN_FLIGHT,
        )
        with self._making_client:  # a session's client factory is not thread-safe
            return self._session.client("s3", config=config)


def _read(answer: Any) -> Fetched:  # noqa: ANN401
    return Fetched(bytes(answer["Body"].read()), answer.get("ETag", "").strip('"'))


_S3_STORES: dict[tuple[object, ...], _S3Store] = {}


def _s3_store() -> _S3Store:
    # Connections do not survive a fork, and a changed environment is another store.
    settings = sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))
    key = (os.getpid(), *settings)
    return _S3_STORES.get(key) or _S3_STORES.setdefault(key, _S3Store())


def _store_error(error: BotoCoreError | ClientError, uri: str) -> StoreError:
    if isinstance(error, _CREDENTIAL_ERRORS):
        remedy = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return AccessDenied(f"{uri}: no usable credentials: {remedy}")
    if not isinstance(error, ClientError):
        remedy = "check AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the network"
        return StoreError(f"{uri}: {type(error).__name__} at {_endpoint()}: {remedy}")
    code, status = error.response.get("Error", {}).get("Code", ""), _status(error)
    if code == "NoSuchBucket":
        return _missing_bucket(split_s3(uri)[0], uri)
    if status == 404:
        return ObjectNotFound(f"{uri}: no such object: check the key")
    if status in {401, 403} or code in _DENIED_CODES:
        remedy = "check the credentials and the bucket's policy (an absent object is refused too,"
        return AccessDenied(f"{uri}: refused ({status} {code}): {remedy} without s3:ListBucket)")
    return StoreError(
        f"{uri}: the store answered {status} {code} at {_endpoint()}: try again later"
    )


def _missing_bucket(bucket: str, uri: str) -> StoreError:
    remedy = "create it, or correct its name or AWS_ENDPOINT_URL"
    return StoreError(f"{uri}: no bucket {bucket!r} at {_endpoint()}: {remedy}")


def _endpoint() -> str:
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    # The host alone: a URL may hold a password.
    return urlsplit(url).netloc.rpartition("@")[2] if url else "AWS"


def _status(error: ClientError) -> int:
    status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status
