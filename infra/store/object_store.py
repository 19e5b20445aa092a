"""Read and write objects by URI, in S3 or on local paths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeAlias

from infra.prefetch import prefetch
from infra.store.byte_budget import ByteBudget, NoRoomError, Reservation, SizeBound
from infra.store.local_store import LocalStore
from infra.store.objects import (
    AccessDenied,
    Admit,
    Fetched,
    Listing,
    ObjectDenied,
    ObjectInfo,
    ObjectNotFound,
    ObjectTooLarge,
    PrefixError,
    StoreError,
    admit_all,
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
    "SizeBound",
    "StoreError",
    "join_uri",
    "normalize_uri",
]


IN_FLIGHT_BYTES = 256 * 2**20

_Found: TypeAlias = Fetched | StoreError | NoRoomError


class _Backend(Protocol):
    def get(self, uri: str) -> bytes: ...
    def fetch(self, uri: str, admit: Admit) -> Fetched: ...
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

    def fetch(self, uri: str, admit: Admit = admit_all) -> Fetched:
        """Read the whole object with its MD5; raise as `get` does, or what `admit` raises."""
        backend, uri = self._route(uri)
        return backend.fetch(uri, admit)

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
        self, uris: Sequence[str], in_flight: int = 32, bounds: Sequence[SizeBound] | None = None
    ) -> Iterator[tuple[str, Fetched | StoreError]]:
        """Prefetch objects and yield them in the order of `uris`, up to `in_flight` at a time.

        Fewer are in flight where those in memory would exceed 256 MB; a larger one is fetched
        alone. An object that cannot be read is yielded as its error, and the others follow. One
        above its bound's `max_bytes` is yielded as ObjectTooLarge, and none of it is read.
        """
        if not 1 <= in_flight <= MAX_CONNECTIONS:
            raise ValueError(f"in_flight = {in_flight}: need 1..{MAX_CONNECTIONS}, our connections")
        pairs = zip(uris, bounds or [SizeBound()] * len(uris), strict=True)
        budget = ByteBudget(IN_FLIGHT_BYTES)
        wanted = [Reservation(budget, uri, bound) for uri, bound in pairs]
        found: Iterator[tuple[Reservation, _Found]]
        if any(is_s3(prefix) for prefix in self.allowed_prefixes):
            enter, leave = Reservation.enter, Reservation.leave
            found = prefetch(self._fetch_beside, wanted, in_flight, enter=enter, leave=leave)
        else:
            # Threads hide S3's round trips, but tripled the cost of local files, to 0.4 ms each.
            found = _in_groups(self._fetch_beside, wanted, in_flight)
        return self._complete(found)

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

    def _complete(
        self, found: Iterator[tuple[Reservation, _Found]]
    ) -> Iterator[tuple[str, Fetched | StoreError]]:
        """Fetch what had no room beside others, when its turn has come."""
        for wanted, outcome in found:
            no_room = isinstance(outcome, NoRoomError)
            yield wanted.uri, self._fetch(wanted, wanted.require_bound) if no_room else outcome
            del outcome  # before the next one comes

    def _fetch_beside(self, wanted: Reservation) -> _Found:
        try:
            return self._fetch(wanted, wanted.admit)
        except NoRoomError as error:
            return error

    def _fetch(self, wanted: Reservation, admit: Admit) -> Fetched | StoreError:
        try:
            return self.fetch(wanted.uri, admit)
        except StoreError as error:
            return error

    def _route(self, uri: str) -> tuple[_Backend, str]:
        normalized = require_within(uri, self.allowed_prefixes)
        return (s3_store() if is_s3(normalized) else LocalStore()), normalized


def _in_groups(
    fetch: Callable[[Reservation], _Found], wanted: Sequence[Reservation], size: int
) -> Iterator[tuple[Reservation, _Found]]:
    """Read `size` objects in a row; a read between two decodings takes twice as long."""
    group: list[tuple[Reservation, _Found]] = []
    for each in wanted:
        found = fetch(each)
        if isinstance(found, NoRoomError):
            yield from _consumed(group)
            found = fetch(each)
        group.append((each, found))
        if len(group) == size:
            yield from _consumed(group)
    yield from _consumed(group)


def _consumed(
    group: list[tuple[Reservation, _Found]],
) -> Iterator[tuple[Reservation, _Found]]:
    """Yield and forget the group, and give its bytes back."""
    group.reverse()
    while group:
        each, found = group.pop()
        yield each, found
        each.leave()
