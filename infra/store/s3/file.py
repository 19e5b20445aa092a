"""Open an object in S3 as a seekable file: s3fs's blocks, with our retries and time limits."""

from collections.abc import Callable

import s3fs
from botocore.config import Config

from infra.store.objects import ObjectInfo, ObjectNotFound, StoreError
from infra.store.request_counts import REQUESTS, RequestCounts
from infra.store.retry import GaveUpError, retry
from infra.store.s3.errors import CorruptTransferError, store_error

BLOCK_BYTES = 8 * 2**20


def file_system(config: Config) -> s3fs.S3FileSystem:
    """Make an s3fs file system with our time limits and without its three layers of retries."""
    system = s3fs.S3FileSystem(
        skip_instance_cache=True,  # its key omits the environment
        config_kwargs={
            "retries": config.retries,
            "connect_timeout": config.connect_timeout,
            "read_timeout": config.read_timeout,
        },
    )
    system.retries = 1
    return system


class S3File(s3fs.S3File):
    """S3File is an object open for reading and seeking, in blocks of 8 MB.

    A range that breaks off is retried as in `retry`, by a file system of `renew` after a refusal.
    Then the caller sees a StoreError. S3 gives no digest of a range, so the caller detects corrupt
    bytes (`infra/store/checked_reads.py`).
    """

    def __init__(
        self,
        system: s3fs.S3FileSystem,
        info: ObjectInfo,
        renew: Callable[[s3fs.S3FileSystem], s3fs.S3FileSystem],
    ) -> None:
        super().__init__(system, info.uri, "rb", BLOCK_BYTES, size=info.num_bytes)
        self.uri = info.uri
        self.fs = system
        self._renew = renew
        # Otherwise s3fs would send a second HEAD.
        self.details = {"name": info.uri, "size": info.num_bytes, "ETag": f'"{info.etag}"'}

    def _fetch_range(self, start: int, end: int) -> bytes:
        try:
            return retry(lambda: self._fetch_whole_range(start, end), _is_transient)
        except GaveUpError as error:
            if isinstance(error.last, FileNotFoundError):
                raise ObjectNotFound(f"{self.uri}: no longer there: check the key") from error
            raise store_error(error.last, self.uri, str(error)) from error

    def _fetch_whole_range(self, start: int, end: int) -> bytes:
        REQUESTS.add(RequestCounts(get=1))
        try:
            data: bytes = super()._fetch_range(start, end)
        except PermissionError:  # an expired token, perhaps: read the credentials again
            self.fs = self._renew(self.fs)
            raise
        REQUESTS.add(RequestCounts(bytes_received=len(data)))
        if len(data) != min(end, self.size) - start:
            raise CorruptTransferError(f"{len(data)} bytes came of {start}..{end}")
        return data


def _is_transient(error: Exception) -> bool:
    # s3fs raises OSErrors and the errors of botocore and aiohttp, and translates some of them.
    # Absence and refusal, too: a HEAD has just found the object.
    return not isinstance(error, StoreError)
