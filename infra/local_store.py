"""Objects on local paths: writes appear whole or not at all, as they do in S3."""

import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from infra.objects import AccessDenied, Fetched, Listing, ObjectInfo, ObjectNotFound, StoreError

# Files of writers that are at work or were killed; a listing leaves them out.
_PARTIAL_PREFIX = ".partial-"
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


class LocalStore:
    """The local half of ObjectStore; takes normalized absolute paths."""

    def fetch(self, uri: str) -> Fetched:
        """Read the whole object; its ETag is the one that S3 would give it."""
        with self.open(uri) as file:
            data = file.read()
        return Fetched(data, hashlib.md5(data, usedforsecurity=False).hexdigest())

    def open(self, uri: str) -> BinaryIO:
        """Open the object for reading."""
        with _store_errors(uri):
            _require_regular(uri, Path(uri).stat())
            return Path(uri).open("rb")

    def put(self, uri: str, data: bytes) -> None:
        """Write the object, replacing what was there in one step."""
        with _store_errors(uri), _partial_file(uri, data) as partial:
            partial.replace(uri)

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        """Write the object unless there is one; say whether we wrote it."""
        with _store_errors(uri), _partial_file(uri, data) as partial:
            try:
                os.link(partial, uri)
            except FileExistsError:
                return False
            return True

    def head(self, uri: str) -> ObjectInfo:
        """Describe the object; its etag is made of size and modification time."""
        with _store_errors(uri):
            status = Path(uri).stat()
            _require_regular(uri, status)
        return _object_info(uri, status)

    def list(self, prefix: str) -> Listing:
        """Describe every object below the directory `prefix`, following no links to directories."""
        with _store_errors(prefix):
            found = [
                _object_info(str(path), status)
                for path in _files_below(prefix)
                if (status := _status(path)) is not None and stat.S_ISREG(status.st_mode)
            ]
        return sorted(found, key=lambda info: info.uri)


def _files_below(directory: str) -> Iterator[Path]:
    for parent, _, names in os.walk(directory, onerror=_raise_unless_missing):
        yield from (Path(parent, name) for name in names if not name.startswith(_PARTIAL_PREFIX))


def _raise_unless_missing(error: OSError) -> None:
    if error.errno not in _MISSING:
        raise error


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # removed since it was listed, or a dangling link
        return None


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
        raise AccessDenied(f"{uri}: permission denied: check its owner and mode") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in _MISSING:
            raise ObjectNotFound(f"{uri}: no such object: check the path") from error
        raise StoreError(f"{uri}: {error.strerror}: check the disk and the path") from error
