"""Pages of a bucket's listing, each confirmed by a second answer.

A listing is the one answer of S3 without a digest, and a key lost from it would be lost audio.
"""

from dataclasses import dataclass
from typing import Any

from infra.store.objects import Listing, ObjectInfo
from infra.store.s3.bodies import etag_of
from infra.store.s3.errors import DamagedError


@dataclass(frozen=True, slots=True)
class Page:
    """Keys in order with their sizes and ETags; the empty one stands before the first."""

    objects: tuple[tuple[str, int, str], ...] = ()
    is_last: bool = False

    @property
    def last_key(self) -> str:
        """The key after which the next page begins."""
        return self.objects[-1][0] if self.objects else ""

    def describe(self, bucket: str) -> Listing:
        """The objects, without what consoles make for "directories"."""
        return [
            ObjectInfo(f"s3://{bucket}/{key}", num_bytes, etag)
            for key, num_bytes, etag in self.objects
            if not key.endswith("/")
        ]


def confirmed_page(client: Any, bucket: str, folder: str, start_after: str) -> Page:  # noqa: ANN401
    """The keys that follow `start_after`; DamagedError if two answers in a row differ."""
    page = _ask(client, bucket, folder, start_after)
    if _ask(client, bucket, folder, start_after) != page:
        raise DamagedError("two listings in a row differ (damaged, or being written to)")
    if not page.is_last and page.last_key <= start_after:
        raise DamagedError(f"a listing that goes on, and not beyond {start_after!r},")
    return page


def _ask(client: Any, bucket: str, folder: str, start_after: str) -> Page:  # noqa: ANN401
    # By key, not by continuation token: a damaged token might leave something out.
    after = {"StartAfter": start_after} if start_after else {}
    answer = client.list_objects_v2(Bucket=bucket, Prefix=folder, **after)
    contents = answer.get("Contents", [])
    objects = tuple((each["Key"], each["Size"], etag_of(each)) for each in contents)
    return Page(objects, not answer["IsTruncated"])
