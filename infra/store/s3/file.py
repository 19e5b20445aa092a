"""Open an object in S3 as a seekable file: s3fs's blocks, with our retries and time limits."""

import s3fs
from botocore.config import Config

from infra.store.objects import AccessDenied, ObjectInfo, ObjectNotFound, StoreError
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

    A range that breaks off is retried as in `retry`. Then the caller sees a StoreError. S3 gives
    no digest of a range, so the caller detects corrupt bytes (`infra/store/checked_reads.py`).
    """

    def __init__(self, system: s3fs.S3FileSystem, info: ObjectInfo) -> None:
        super().__init__(system, info.uri, "rb", BLOCK_BYTES, size=info.num_bytes)
        self.uri = info.uri
        # Otherwise s3fs would send a second HEAD.
        self.details = {"name": info.uri, "size": info.num_bytes, "ETag": f'"{info.etag}"'}

    def _fetch_range(self, start: int, end: int) -> bytes:
        try:
            return retry(lambda: self._fetch_whole_range(start, end), _is_transient)
        except GaveUpError as error:
            raise store_error(error.last, self.uri, str(error)) from error
        except FileNotFoundError as error:
            raise ObjectNotFound(f"{self.uri}: no such object: check the key") from error
        except PermissionError as error:
            raise AccessDenied(f"{self.uri}: refused: check the credentials") from error

    def _fetch_whole_range(self, start: int, end: int) -> bytes:
        REQUESTS.add(RequestCounts(get=1))
        data: bytes = super()._fetch_range(start, end)
        REQUESTS.add(RequestCounts(bytes_received=len(data)))
        if len(data) != min(end, self.size) - start:
            raise CorruptTransferError(f"{len(data)} bytes came of {start}..{end}")
        return data


def _is_transient(error: Exception) -> bool:
    # s3fs raises OSErrors and the errors of botocore and aiohttp, and translates some of them.
    return not isinstance(error, FileNotFoundError | PermissionError | StoreError)
