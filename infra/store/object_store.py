"""Read and write objects by URI, in S3 or on local paths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Protocol

from infra.prefetch import prefetch
from infra.store.local_store import LocalStore
from infra.store.objects import (
    AccessDenied,
    Fetched,
    Listing,
    ObjectDenied,
    ObjectInfo,
    ObjectNotFound,
    ObjectTooLarge,
    PrefixError,
    StoreError,
)
from infra.store.s3.s3_store import MAX_CONNECTIONS, s3_store
from infra.store.uris import is_s3, join_uri, normalize_uri, require_within, resolve_prefix

__all__ = [
    "AccessDenied",
    "Fetched",
    "ObjectDenied",
    "ObjectInfo",
    "ObjectNotFound",
    "ObjectStore",
    "ObjectTooLarge",
    "PrefixError",
    "StoreError",
    "join_uri",
    "normalize_uri",
]


class _Backend(Protocol):
    def get(self, uri: str) -> bytes: ...
    def fetch(self, uri: str, max_bytes: int | None) -> Fetched: ...
    def put(self, uri: str, data: bytes) -> None: ...
    def put_if_absent(self, uri: str, data: bytes) -> bool: ...
    def head(self, uri: str) -> ObjectInfo: ...
    def list(self, prefix: str) -> Listing: ...
    def open(self, uri: str) -> BinaryIO: ...
    def delete(self, uri: str) -> None: ...
    def leftovers(self, prefix: str) -> Listing: ...


@dataclass(frozen=True)
class ObjectStore:
    """ObjectStore reads and writes whole objects at `s3://bucket/key` or local paths.

    A store can be pickled and shared between threads; each process makes its own clients. S3's
    transient errors are retried (`infra/store/retry.py`). That an object is absent or denied is
    believed when four answers say so. All other errors are raised at once.
    A URI outside `allowed_prefixes`, by `..` or a symlink too, raises PrefixError.
    """

    allowed_prefixes: tuple[str, ...]

    def __post_init__(self) -> None:
        # Resolve here, once: a worker may have another working directory.
        resolved = tuple(resolve_prefix(prefix) for prefix in self.allowed_prefixes)
        object.__setattr__(self, "allowed_prefixes", resolved)

    def get(self, uri: str) -> bytes:
        """Read the whole object; raise ObjectNotFound, AccessDenied or StoreError."""
        # Not by fetch: on local paths its MD5 costs a fifth of a trainer's reading time.
        backend, uri = self._route(uri)
        return backend.get(uri)

    def fetch(self, uri: str, max_bytes: int | None = None) -> Fetched:
        """Read the whole object with its ETag; raise as `get` does, or ObjectTooLarge."""
        backend, uri = self._route(uri)
        return backend.fetch(uri, max_bytes)

    def put(self, uri: str, data: bytes) -> None:
        """Write the object or replace it; readers see either the old bytes or the new."""
        backend, uri = self._route(uri)
        backend.put(uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        """Write the object unless there is one already; return whether we wrote it.

        Of several concurrent writers exactly one wins. False may also mean that our own write
        succeeded, its answer was lost and the retry found it: read the object and compare.
        """
        backend, uri = self._route(uri)
        return backend.put_if_absent(uri, data)

    def head(self, uri: str) -> ObjectInfo:
        """Describe the object without reading it; raise ObjectNotFound if there is none."""
        backend, uri = self._route(uri)
        return backend.head(uri)

    def exists(self, uri: str) -> bool:
        """Return whether there is an object at `uri`; a missing bucket raises StoreError."""
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
        self, uris: Sequence[str], in_flight: int = 32, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Fetched | StoreError]]:
        """Prefetch objects and yield them in the order of `uris`, up to `in_flight` at a time.

        An object that cannot be read is yielded as its error, and the others follow. An object
        above `max_bytes` is yielded as ObjectTooLarge, and none of its bytes are read.
        """
        if not 1 <= in_flight <= MAX_CONNECTIONS:
            raise ValueError(f"in_flight = {in_flight}: need 1..{MAX_CONNECTIONS}, our connections")
        fetch = partial(self._fetch_or_error, max_bytes)
        if not any(is_s3(prefix) for prefix in self.allowed_prefixes):
            # Threads hide S3's round trips, but tripled the cost of local files, to 0.4 ms each.
            return _in_groups(fetch, uris, in_flight)
        return prefetch(fetch, uris, in_flight)

    def open(self, uri: str) -> BinaryIO:
        """Open the object for reading and seeking; from S3, in blocks of 8 MB."""
        backend, uri = self._route(uri)
        return backend.open(uri)

    def delete(self, uri: str) -> None:
        """Remove the object; an absent one is no error."""
        backend, uri = self._route(uri)
        backend.delete(uri)

    def leftovers(self, prefix: str) -> Listing:
        """Describe the partial files below `prefix/` of writers that were killed or are at work.

        They are not objects, so `list` omits them. S3 has none.
        """
        backend, prefix = self._route(prefix)
        return backend.leftovers(prefix)

    def _fetch_or_error(self, max_bytes: int | None, uri: str) -> Fetched | StoreError:
        try:
            return self.fetch(uri, max_bytes)
        except StoreError as error:
            return error

    def _route(self, uri: str) -> tuple[_Backend, str]:
        normalized = require_within(uri, self.allowed_prefixes)
        return (s3_store() if is_s3(normalized) else LocalStore()), normalized


def _in_groups(
    fetch: Callable[[str], Fetched | StoreError], uris: Sequence[str], size: int
) -> Iterator[tuple[str, Fetched | StoreError]]:
    """Read `size` objects in a row; a read between two decodings takes twice as long."""
    for first in range(0, len(uris), size):
        yield from [(uri, fetch(uri)) for uri in uris[first : first + size]]
