"""Reads by readers that can tell damage: done again a few times before it is called damage.

What the network damaged comes whole the next time; what the disk damaged does not.
"""

from collections.abc import Callable
from typing import BinaryIO, TypeVar

from infra.store.object_store import ObjectStore
from infra.store.retry import GaveUpError, retry

R = TypeVar("R")

MAX_READS = 4


def read_checked(store: ObjectStore, uri: str, parse: Callable[[bytes], R]) -> R:
    """`parse` of the whole object; its ValueError, if it stays, is raised with the URI."""
    return _until_whole(uri, lambda: parse(store.get(uri)))


def scan_checked(store: ObjectStore, uri: str, scan: Callable[[BinaryIO], R]) -> R:
    """`scan` of the object as a seekable file; its ValueError, if it stays, with the URI."""

    def attempt() -> R:
        with store.open(uri) as file:
            return scan(file)

    return _until_whole(uri, attempt)


def _until_whole(uri: str, attempt: Callable[[], R]) -> R:
    try:
        return retry(attempt, lambda error: isinstance(error, ValueError), MAX_READS)
    except GaveUpError as error:
        raise ValueError(f"{uri}: {error.last}") from error.last
