"""Read and write objects by URI, in S3 or on local paths.

Fetched objects share a budget of bytes in memory, and each has its own limit. Checked reads are for
objects whose parser detects corruption: they are fetched again before they are reported as corrupt,
as bytes that the network corrupted arrive whole the next time, and those that a disk corrupted do
not.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Generic, TypeAlias, TypeVar

from infra.prefetch import prefetch
from infra.store.local_store import LocalStore
from infra.store.objects import (
    AccessDenied,
    Admit,
    Fetched,
    FetchedRange,
    Listing,
    ObjectDenied,
    ObjectInfo,
    ObjectNotFound,
    ObjectTooLarge,
    PrefixError,
    StoreError,
    admit_all,
)
from infra.store.retry import GaveUpError, retry
from infra.store.s3 import MAX_CONNECTIONS, S3Store, s3_store
from infra.store.uris import is_s3, join_uri, normalize_uri, require_within, resolve_prefix

# What other modules import from here beside what this one defines.
__all__ = [
    "AccessDenied",
    "Fetched",
    "FetchedRange",
    "ObjectDenied",
    "ObjectInfo",
    "ObjectNotFound",
    "ObjectTooLarge",
    "PrefixError",
    "StoreError",
    "join_uri",
    "normalize_uri",
]


class NoRoomError(Exception):
    """NoRoomError says that an object does not fit beside those in memory; fetch it alone."""


@dataclass(frozen=True, slots=True)
class SizeBound:
    """SizeBound holds the bytes that an object probably has, and those above which it is refused.

    What is expected bounds the requests in flight, before any size is known.
    """

    expected_bytes: int = 0
    max_bytes: int | None = None


class ByteBudget:
    """ByteBudget counts the bytes in memory, from several threads, against a total."""

    def __init__(self, total: int) -> None:
        self._total, self._used = total, 0
        self._lock = threading.Lock()

    def grow(self, held: int, more: int) -> bool:
        """Count `more` bytes for an object that holds `held`; False if they do not fit.

        They always fit where no other object holds any.
        """
        with self._lock:
            fits = self._used == held or self._used + more <= self._total
            if fits:
                self._used += more
            return fits

    def give_back(self, held: int) -> None:
        """Count `held` bytes less."""
        with self._lock:
            self._used -= held


IN_FLIGHT_BYTES = 256 * 2**20

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ObjectRead(Generic[R]):
    """ObjectRead is what `read_each` reads of one object, by the function `read`.

    The function calls `admit` with the bytes that it will hold, and raises what that raises.
    """

    uri: str
    bound: SizeBound
    read: Callable[[Admit], R]


@dataclass(slots=True)
class Reservation(Generic[R]):
    """Reservation holds a read's share of a budget, from its request until it is consumed."""

    budget: ByteBudget
    read: ObjectRead[R]
    held: int = field(default=0, init=False)

    def enter(self) -> bool:
        """Reserve the expected bytes; return whether they fit."""
        return self._hold(self.read.bound.expected_bytes)

    def admit(self, num_bytes: int) -> None:
        """Reserve the bytes that the object really has, or raise NoRoomError or ObjectTooLarge."""
        self.require_bound(num_bytes)
        if not self._hold(num_bytes):
            raise NoRoomError(f"{self.read.uri}: no room for {num_bytes} bytes")

    def require_bound(self, num_bytes: int) -> None:
        """Raise ObjectTooLarge for more bytes than the object may have."""
        most = self.read.bound.max_bytes
        if most is not None and num_bytes > most:
            raise ObjectTooLarge(f"{self.read.uri}: {num_bytes} bytes: need at most {most}")

    def leave(self) -> None:
        """Give the bytes back, when the object has been consumed."""
        self.budget.give_back(self.held)
        self.held = 0

    def _hold(self, num_bytes: int) -> bool:
        more = max(num_bytes - self.held, 0)
        fits = self.budget.grow(self.held, more)
        self.held += more if fits else 0
        return fits

    def finish(self, admit: Admit) -> R | StoreError:
        """Read the object, or return why it cannot be read."""
        try:
            return self.read.read(admit)
        except StoreError as error:
            return error

    def finish_beside(self) -> R | StoreError | NoRoomError:
        """Read it beside others, if it has room."""
        try:
            return self.finish(self.admit)
        except NoRoomError as error:
            return error


Found: TypeAlias = tuple[Reservation[R], R | StoreError | NoRoomError]


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

    def fetch_range(self, uri: str, start: int, num_bytes: int) -> FetchedRange:
        """Read `num_bytes` from `start` on in one request, or fewer where the object ends."""
        backend, uri = self._route(uri)
        return backend.fetch_range(uri, start, num_bytes)

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
        return sorted(self.list_each(prefix), key=lambda info: info.uri)

    def list_each(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield what `list` holds, in any order: a page of S3, or a folder's files, in memory."""
        backend, prefix = self._route(prefix)
        return backend.list_each(prefix)

    def get_many(
        self, uris: Sequence[str], in_flight: int = 32, bounds: Sequence[SizeBound] | None = None
    ) -> Iterator[tuple[str, Fetched | StoreError]]:
        """Prefetch objects and yield them in the order of `uris`, up to `in_flight` at a time.

        Fewer are in flight where those in memory would exceed 256 MB; a larger one is fetched
        alone. An object that cannot be read is yielded as its error, and the others follow. One
        above its bound's `max_bytes` is yielded as ObjectTooLarge, and none of it is read.
        """
        pairs = zip(uris, bounds or [SizeBound()] * len(uris), strict=True)
        reads = [ObjectRead(uri, bound, partial(self.fetch, uri)) for uri, bound in pairs]
        for read, outcome in self.read_each(reads, in_flight):
            yield read.uri, outcome
            del outcome  # before the next one comes

    def read_each(
        self, reads: Sequence[ObjectRead[R]], in_flight: int
    ) -> Iterator[tuple[ObjectRead[R], R | StoreError]]:
        """Perform `reads` ahead of their reader, in order, within the bounds of `get_many`."""
        assert 1 <= in_flight <= MAX_CONNECTIONS
        budget = ByteBudget(IN_FLIGHT_BYTES)
        waiting = [Reservation(budget, read) for read in reads]
        finish: Callable[[Reservation[R]], R | StoreError | NoRoomError] = Reservation.finish_beside
        if any(is_s3(prefix) for prefix in self.allowed_prefixes):
            enter, leave = Reservation.enter, Reservation.leave
            found: Iterator[Found[R]] = prefetch(
                finish, waiting, in_flight, enter=enter, leave=leave
            )
        else:
            # Threads hide S3's round trips, but tripled the cost of local files, to 0.4 ms each.
            found = _in_groups(waiting, in_flight)
        for each, outcome in found:
            if isinstance(outcome, NoRoomError):  # its turn has come, so it is read alone
                yield each.read, each.finish(each.require_bound)
            else:
                yield each.read, outcome
            del outcome  # before the next one comes

    def open(self, uri: str) -> BinaryIO:
        """Open the object for reading and seeking; from S3, in blocks of 8 MB."""
        backend, uri = self._route(uri)
        return backend.open(uri)

    def delete(self, uri: str) -> None:
        """Remove the object; an absent one is no error."""
        backend, uri = self._route(uri)
        backend.delete(uri)

    def delete_many(self, uris: Sequence[str]) -> None:
        """Remove objects in any order, up to 32 at a time in S3; absent ones are no error.

        StoreError of one that cannot be removed; others may be removed by then.
        """
        # A local file is removed faster than a thread is asked to.
        in_flight = 32 if any(map(is_s3, self.allowed_prefixes)) else 1
        for _ in prefetch(self.delete, uris, in_flight):
            pass

    def leftovers(self, prefix: str) -> Listing:
        """Describe the partial files below `prefix/` of writers that were killed or are at work.

        They are not objects, so `list` omits them. S3 has none.
        """
        backend, prefix = self._route(prefix)
        return backend.leftovers(prefix)

    def check(self, folder: str) -> None:
        """Raise StoreError unless conditional writes have one winner, and listings are in order.

        In S3 this leaves eleven small objects below `folder`. A local folder has to be writable.
        """
        backend, folder = self._route(folder)
        backend.check(folder)

    def _route(self, uri: str) -> tuple[LocalStore | S3Store, str]:
        normalized = require_within(uri, self.allowed_prefixes)
        return (s3_store() if is_s3(normalized) else LocalStore()), normalized


def _in_groups(waiting: Sequence[Reservation[R]], size: int) -> Iterator[Found[R]]:
    """Read `size` objects in a row; a read between two decodings takes twice as long."""
    group: list[Found[R]] = []
    for each in waiting:
        found = each.finish_beside()
        if isinstance(found, NoRoomError):
            yield from _consumed(group)
            found = each.finish_beside()
        group.append((each, found))
        del found
        if len(group) == size:
            yield from _consumed(group)
    yield from _consumed(group)


def _consumed(group: list[Found[R]]) -> Iterator[Found[R]]:
    """Yield and forget the group, and give its bytes back."""
    group.reverse()
    while group:
        each, found = group.pop()
        yield each, found
        each.leave()


MAX_READS = 4


def read_checked(store: ObjectStore, uri: str, parse: Callable[[bytes], R]) -> R:
    """Read the whole object and return `parse` of it.

    A ValueError of `parse` is retried on a fresh read, four reads in all; the last one is raised
    with the URI. StoreErrors are raised as they are.
    """
    return until_whole(uri, lambda: parse(store.get(uri)))


def scan_checked(store: ObjectStore, uri: str, scan: Callable[[BinaryIO], R]) -> R:
    """Open the object and return `scan` of the seekable file; errors are as in `read_checked`."""

    def attempt() -> R:
        with store.open(uri) as file:
            return scan(file)

    return until_whole(uri, attempt)


def until_whole(uri: str, attempt: Callable[[], R]) -> R:
    """Return what `attempt` reads of the object; errors are as in `read_checked`."""
    try:
        return retry(attempt, lambda error: isinstance(error, ValueError), MAX_READS)
    except GaveUpError as error:
        raise ValueError(f"{uri}: {error.last}") from error.last
