"""Send and read whole bodies, in bounded time, and compare them with the MD5 that S3 keeps."""

import hashlib
import io
import re
import time
from collections.abc import Mapping
from typing import Any

from infra.store.request_counts import REQUESTS, RequestCounts
from infra.store.s3.errors import CorruptTransferError

CHUNK_BYTES = 2**20
_PATIENCE_S = 60.0
_SLOWEST_BYTES_PER_S = 1e6
_MD5 = re.compile(r"[0-9a-f]{32}")


def time_limit_s(num_bytes: int) -> float:
    """Return the limit for a body: a minute, plus a second for each megabyte."""
    return _PATIENCE_S + num_bytes / _SLOWEST_BYTES_PER_S


class TimedBody(io.BytesIO):
    """TimedBody limits the time of a whole body to send; the socket limits that of each piece."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._deadline = time.monotonic() + time_limit_s(len(data))

    def read(self, size: int | None = -1) -> bytes:
        """Read the next piece; raise TimeoutError when the whole takes too long."""
        if time.monotonic() > self._deadline:
            raise TimeoutError("the body was not accepted in time")
        return super().read(size)


def read_body(answer: Mapping[str, Any]) -> bytes:
    """Read a GET's whole body; CorruptTransferError if it is too slow or its ETag differs."""
    body, num_bytes = answer["Body"], answer["ContentLength"]
    deadline = time.monotonic() + time_limit_s(num_bytes)
    whole = io.BytesIO()
    while chunk := body.read(CHUNK_BYTES):
        whole.write(chunk)
        REQUESTS.add(RequestCounts(bytes_received=len(chunk)))
        if time.monotonic() > deadline:
            raise CorruptTransferError(f"only {whole.tell()} of {num_bytes} bytes came in time")
    data = whole.getvalue()
    require_md5(answer, hashlib.md5(data, usedforsecurity=False).hexdigest())
    return data


def etag_of(answer: Mapping[str, Any]) -> str:
    """Return the ETag without its quotes."""
    etag: str = answer.get("ETag", "").strip('"')
    return etag


def require_md5(answer: Mapping[str, Any], md5: str) -> None:
    """Raise CorruptTransferError if the ETag is an MD5 other than `md5`.

    Other ETags are accepted unchecked: those of multipart uploads contain a dash, and those of
    objects encrypted under KMS or customers' keys are random.
    """
    etag = etag_of(answer)
    encrypted = "aws:kms" in answer.get("ServerSideEncryption", "")
    if encrypted or "SSECustomerAlgorithm" in answer or not _MD5.fullmatch(etag):
        return
    if etag != md5:
        raise CorruptTransferError(f"MD5 of the bytes is {md5}, the store's ETag says {etag}")
