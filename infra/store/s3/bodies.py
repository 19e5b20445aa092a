"""Read whole bodies and compare them with the MD5 that S3 keeps."""

import hashlib
import io
import re
from collections.abc import Mapping
from typing import Any

from infra.store.objects import Admit, Fetched, FetchedRange, ObjectInfo, admit_all
from infra.store.request_counts import REQUESTS, RequestCounts
from infra.store.s3.errors import CorruptTransferError
from infra.store.s3.watchdog import current_watch

CHUNK_BYTES = 2**20
_MD5 = re.compile(r"[0-9a-f]{32}")


def read_object(answer: Mapping[str, Any], admit: Admit) -> Fetched:
    """Read the whole body of a GET; CorruptTransferError if it breaks off or its ETag differs.

    `admit` learns the object's size before the first byte is read; of an answer in chunks, which
    states no size, it learns the size so far.
    """
    data = read_body(answer, admit)
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    require_md5(answer, md5)
    if not _states_its_end(answer) and not _has_md5(answer):
        missing = "neither a Content-Length nor an MD5: if it broke off, it would look whole"
        raise CorruptTransferError(f"an answer with {missing}")
    return Fetched(data, md5)


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def read_range(answer: Mapping[str, Any], start: int, num_bytes: int) -> FetchedRange:
    """Read the body of a GET with a range; CorruptTransferError unless it is the range.

    S3 gives no digest of a range.
    """
    stated = _CONTENT_RANGE.fullmatch(required(answer, "ContentRange"))
    if stated is None or int(stated[1]) != start:
        raise CorruptTransferError(f"the range {answer['ContentRange']!r} for one from {start}")
    object_bytes = int(stated[3])
    expected = min(num_bytes, object_bytes - start)
    data = read_body(answer, admit_all)
    if len(data) != expected:
        raise CorruptTransferError(f"{len(data)} bytes came of {expected} from {start}")
    return FetchedRange(data, object_bytes, etag_of(answer))


def read_body(answer: Mapping[str, Any], admit: Admit) -> bytes:
    """Read the whole body, whose time the watchdog limits by its size."""
    body, num_bytes, watch = answer["Body"], answer.get("ContentLength"), current_watch()
    whole = io.BytesIO()
    while True:
        expected = whole.tell() if num_bytes is None else num_bytes
        admit(expected)
        if watch is not None:
            watch.allow(expected)
        chunk: bytes = body.read(CHUNK_BYTES)
        if not chunk:
            return whole.getvalue()
        whole.write(chunk)
        REQUESTS.add(RequestCounts(bytes_received=len(chunk)))
        if watch is not None:
            watch.receive(len(chunk))


def etag_of(answer: Mapping[str, Any]) -> str:
    """Return the ETag without its quotes, or "" for an answer without one."""
    etag: str = answer.get("ETag", "").strip('"')
    return etag


def described(uri: str, answer: Mapping[str, Any]) -> ObjectInfo:
    """Describe an object by the answer to a HEAD request."""
    size, written_at = required(answer, "ContentLength"), answer.get("LastModified")
    return ObjectInfo(uri, size, etag_of(answer), written_at)


def required(answer: Mapping[str, Any], field: str) -> Any:  # noqa: ANN401 - of the field's type
    """Return a field of an answer; CorruptTransferError for an answer without it."""
    if field not in answer:
        raise CorruptTransferError(f"an answer without {field}")
    return answer[field]


def require_md5(answer: Mapping[str, Any], md5: str) -> None:
    """Raise CorruptTransferError if the ETag is an MD5 other than `md5`.

    Other ETags are accepted unchecked: those of multipart uploads contain a dash, and those of
    objects encrypted under KMS or customers' keys are random.
    """
    if _has_md5(answer) and (etag := etag_of(answer)) != md5:
        raise CorruptTransferError(f"MD5 of the bytes is {md5}, the store's ETag says {etag}")


def _has_md5(answer: Mapping[str, Any]) -> bool:
    encrypted = "aws:kms" in answer.get("ServerSideEncryption", "")
    encrypted = encrypted or "SSECustomerAlgorithm" in answer
    return not encrypted and _MD5.fullmatch(etag_of(answer)) is not None


def _states_its_end(answer: Mapping[str, Any]) -> bool:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return "ContentLength" in answer or "chunked" in headers.get("transfer-encoding", "").lower()
