"""Read objects whose parser detects corruption, and retry before reporting an object as corrupt.

Bytes that the network corrupted arrive whole the next time; bytes that the disk corrupted do not.
"""

from collections.abc import Callable
from typing import BinaryIO, TypeVar

from infra.store.object_store import ObjectStore
from infra.store.retry import GaveUpError, retry

R = TypeVar("R")

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
