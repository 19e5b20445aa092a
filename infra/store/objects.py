"""Describe objects, and define the errors of a store: of one object, or of access to all.

ObjectNotFound, ObjectDenied and ObjectTooLarge are about one object, whose neighbours may be well.
Every other StoreError is about access: credentials, the clock, the bucket, the network.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias


class StoreError(Exception):
    """StoreError says that an operation failed for good; it names the URI and a remedy."""


class RequestRefused(StoreError):  # noqa: N818
    """RequestRefused says that the store cannot or will not do what a request asks of it."""

    def __init__(self, uri: str, answer: str, remedy: str) -> None:
        super().__init__(uri, answer, remedy)  # what unpickling gives back
        self.uri, self.answer, self.remedy = uri, answer, remedy

    def __str__(self) -> str:
        return f"{self.uri}: {self.answer}: {self.remedy}"


class PrefixError(StoreError):
    """PrefixError refuses a URI that is malformed, has `..`, or is outside allowed prefixes.

    `is_outside` says that it is the last of these.
    """

    is_outside = False


class ObjectNotFound(StoreError):  # noqa: N818
    """ObjectNotFound says that no object is at this URI; its bucket or directory may exist."""


class ObjectTooLarge(StoreError):  # noqa: N818
    """ObjectTooLarge says that an object has more bytes than its reader takes; none were read."""


class AccessDenied(StoreError):  # noqa: N818
    """AccessDenied says that the store refuses our credentials, or that there are none."""


class ObjectDenied(AccessDenied):
    """ObjectDenied says that our credentials, good as they may be, do not open this one object."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """ObjectInfo holds an object's URI, size, and an etag that changes with its bytes.

    `head` alone says when it was written, if the store does.
    """

    uri: str
    num_bytes: int
    etag: str
    written_at: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Fetched holds an object's bytes and their MD5, which is the ETag that one PUT gives them.

    The store's own ETag depends on how an object was uploaded, and an answer may lack it.
    """

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class FetchedRange:
    """FetchedRange holds bytes of an object, whose size and etag are those of the whole.

    Fewer bytes than were asked for mean that the object ends there.
    """

    data: bytes
    object_bytes: int
    etag: str


Admit: TypeAlias = Callable[[int], None]
"""A function that learns how many bytes will be held in memory, and raises to refuse them."""


def admit_all(num_bytes: int) -> None:
    """Refuse no number of bytes."""
    del num_bytes


# In a class with a method called `list`, the word no longer names the type.
Listing: TypeAlias = list[ObjectInfo]
