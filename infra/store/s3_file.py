"""Open an object in S3 as a seekable file: s3fs's blocks, read by our own requests."""

from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeAlias

import s3fs

from infra.store.objects import ObjectInfo
from infra.store.s3_bodies import read_range

BLOCK_BYTES = 8 * 2**20

Perform: TypeAlias = Callable[[str, Callable[[Any, dict[str, str]], bytes]], bytes]
"""A function that calls another with a client and an object's address, with retries."""


class S3File(s3fs.S3File):
    """S3File is an object open for reading and seeking, in blocks of 8 MB.

    S3 gives no digest of a range, so the caller detects corrupt bytes
    (`infra/store/object_store.py`). An object that is replaced meanwhile is an error.
    """

    def __init__(self, info: ObjectInfo, perform: Perform) -> None:
        # The file system gives its rules for paths; it opens no connection of its own.
        super().__init__(s3fs.S3FileSystem(), info.uri, "rb", BLOCK_BYTES, size=info.num_bytes)
        self.info, self._perform = info, perform
        # Otherwise s3fs would send a second HEAD.
        self.details = {"name": info.uri, "size": info.num_bytes, "ETag": f'"{info.etag}"'}

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self.info.num_bytes)
        unchanged = {"IfMatch": self.details["ETag"]} if self.info.etag else {}

        def attempt(client: Any, address: dict[str, str]) -> bytes:  # noqa: ANN401
            span = f"bytes={start}-{end - 1}"
            answer = client.get_object(**address, Range=span, **unchanged)
            with closing(answer["Body"]):
                return read_range(answer, start, end - start).data

        return self._perform(self.info.uri, attempt)
