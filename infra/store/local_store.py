"""Keep objects on local paths; writes appear whole or not at all, as they do in S3."""

import errno
import hashlib
import io
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from infra.store.objects import (
    Admit,
    Fetched,
    FetchedRange,
    Listing,
    ObjectDenied,
    ObjectInfo,
    ObjectNotFound,
    StoreError,
    admit_all,
)
from infra.task_metrics import REQUESTS, RequestCounts

# Marks the files of writers that are at work or were killed; a listing omits them.
_PARTIAL_PREFIX = ".partial-"
# No object exists where no file can: a name above 255 bytes, symlinks in a circle, a socket.
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAKE_ROOM = "make room, or raise the quota or ulimit -f; the same command then resumes"


class LocalStore:
    """LocalStore is the local half of ObjectStore; it takes normalized absolute paths."""

    def get(self, uri: str) -> bytes:
        """Read the whole object."""
        return self._read(uri, admit_all)

    def fetch(self, uri: str, admit: Admit) -> Fetched:
        """Read the whole object, after `admit` learnt its size."""
        data = self._read(uri, admit)
        return Fetched(data, hashlib.md5(data, usedforsecurity=False).hexdigest())

    def fetch_range(self, uri: str, start: int, num_bytes: int) -> FetchedRange:
        """Read some bytes of the object."""
        data = b""
        try:
            with _store_errors(uri), io.BufferedReader(_open_regular(uri)) as file:
                status = os.fstat(file.fileno())
                # The length that is there, as a range may be far beyond it.
                length = max(min(num_bytes, status.st_size - start), 0)
                if length:
                    file.seek(start)
                    data = file.read(length)
        finally:
            REQUESTS.add(RequestCounts(get=1, bytes_received=len(data)))
        return FetchedRange(data, status.st_size, _object_info(uri, status).etag)

    def _read(self, uri: str, admit: Admit) -> bytes:
        data = b""
        try:
            # Unbuffered: a whole file in 6 us, through Path.open and its buffer in 15.
            with _store_errors(uri), _open_regular(uri) as file:
                admit(os.fstat(file.fileno()).st_size)
                data = file.readall()
        finally:
            REQUESTS.add(RequestCounts(get=1, bytes_received=len(data)))
        return data

    def open(self, uri: str) -> BinaryIO:
        """Open the object for reading."""
        REQUESTS.add(RequestCounts(get=1))
        with _store_errors(uri):
            return io.BufferedReader(_open_regular(uri))

    def put(self, uri: str, data: bytes) -> None:
        """Write the object or replace it, atomically."""
        REQUESTS.add(RequestCounts(put=1, bytes_sent=len(data)))
        with _store_errors(uri), _partial_file(uri, data) as partial:
            partial.replace(uri)

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        """Write the object unless there is one; return whether we wrote it."""
        REQUESTS.add(RequestCounts(put=1, bytes_sent=len(data)))
        with _store_errors(uri), _partial_file(uri, data) as partial:
            try:
                os.link(partial, uri)
            except FileExistsError:
                return False
            return True

    def head(self, uri: str) -> ObjectInfo:
        """Describe the object; its etag is made of size and modification time."""
        REQUESTS.add(RequestCounts(head=1))
        with _store_errors(uri):
            status = Path(uri).stat()
            _require_regular(uri, status)
        written_at = datetime.fromtimestamp(status.st_mtime, UTC)
        return replace(_object_info(uri, status), written_at=written_at)

    def list_each(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects as the directories hold them; follow no links to directories."""
        REQUESTS.add(RequestCounts(list=1))
        yield from _describe(prefix, partial=False)

    def leftovers(self, prefix: str) -> Listing:
        """Describe the partial files below the directory `prefix`."""
        return sorted(_describe(prefix, partial=True), key=lambda info: info.uri)

    def check(self, folder: str) -> None:
        """Raise StoreError for a folder that cannot be made; links are the system's own."""
        with _store_errors(folder):
            nearest = next(each for each in (Path(folder), *Path(folder).parents) if each.exists())
            if not nearest.is_dir():
                raise StoreError(f"{nearest}: a file, not a folder: name another place")
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise StoreError(f"{nearest}: permission denied: check its owner and mode")

    def delete(self, uri: str) -> None:
        """Remove the object, if it is there."""
        with _store_errors(uri), suppress(FileNotFoundError):
            Path(uri).unlink()


def _describe(directory: str, partial: bool) -> Iterator[ObjectInfo]:
    def raise_unless_missing(error: OSError) -> None:
        if error.errno not in _MISSING:
            raise error

    with _store_errors(directory):
        for parent, _, names in os.walk(directory, onerror=raise_unless_missing):
            for name in names:
                if name.startswith(_PARTIAL_PREFIX) is not partial:
                    continue
                path = Path(parent, name)
                with suppress(FileNotFoundError):  # removed since the listing, or a dangling link
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield _object_info(str(path), status)


def _open_regular(uri: str) -> io.FileIO:
    # Opening a named pipe would wait for its writer.
    file = io.FileIO(uri, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    try:
        _require_regular(uri, os.fstat(file.fileno()))
    except ObjectNotFound:
        file.close()
        raise
    return file


def _object_info(uri: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(uri, status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")


def _require_regular(uri: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ObjectNotFound(f"{uri}: a directory or device, not an object: check the path")


@contextmanager
def _partial_file(uri: str, data: bytes) -> Iterator[Path]:
    target = Path(uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f"{_PARTIAL_PREFIX}{uuid.uuid4().hex}"
    try:
        partial.write_bytes(data)
        yield partial
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _store_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise ObjectDenied(f"{uri}: permission denied: check its owner and mode") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in _MISSING:
            raise ObjectNotFound(f"{uri}: no such object: check the path") from error
        remedy = _MAKE_ROOM if error.errno in _NO_ROOM else "check the disk and the path"
        raise StoreError(f"{uri}: {error.strerror}: {remedy}") from error
