"""List a bucket by pages, and confirm each page by a second answer.

A listing is the only answer of S3 without a digest, and a key lost from it would be lost audio.
Pages follow each other by key, so a store that lists in another order than that of keys is refused.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from infra.store.objects import Listing, ObjectInfo
from infra.store.s3.bodies import etag_of, required
from infra.store.s3.errors import CorruptTransferError, ListingFaultError


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

    ListingFaultError unless the keys are in `folder`, and each is behind the one before it.
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
            raise ListingFaultError(f"a listing out of order, with {key!r} behind {before!r},")
        if not key.startswith(folder):
            raise ListingFaultError(f"a listing of {folder!r} with {key!r}")
    if not keys and not page.is_last:
        raise ListingFaultError(f"a listing with more pages that does not pass {start_after!r},")


def names_before(folder: str, last_key: str) -> list[str]:
    """Return the prefixes of keys that a walk of directories lists only behind `last_key`.

    It lists day-late/ behind day/. Where a page ends within day/, a store that walks, and resumes
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
