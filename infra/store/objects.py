"""What a store of objects speaks of: a description of an object, and the errors."""

from dataclasses import dataclass
from typing import TypeAlias


class StoreError(Exception):
    """The store could not do what was asked; the message names the URI and a remedy."""


class PrefixError(StoreError):
    """A URI that is malformed, climbs out by `..`, or lies outside the allowed prefixes."""


class ObjectNotFound(StoreError):  # noqa: N818
    """There is no object at this URI (its bucket or directory may exist)."""


class ObjectTooLarge(StoreError):  # noqa: N818
    """The object has more bytes than its reader takes; none was read."""


class AccessDenied(StoreError):  # noqa: N818
    """The store knows us and refuses, or does not know us."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's address, size, and a tag that changes when its bytes change."""

    uri: str
    num_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """An object's bytes and its ETag; on local paths the MD5 that S3 gives what one PUT wrote."""

    data: bytes
    etag: str


def require_at_most(max_bytes: int | None, num_bytes: int, uri: str) -> None:
    """Raise ObjectTooLarge for an object beyond `max_bytes`; None is no bound."""
    if max_bytes is not None and num_bytes > max_bytes:
        raise ObjectTooLarge(f"{uri}: {num_bytes} bytes: need at most {max_bytes}")


# Beside a method called `list`, the word no longer names the type.
Listing: TypeAlias = list[ObjectInfo]
