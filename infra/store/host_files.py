"""Keep copies of stored objects in a folder of this host, which all its processes map.

The folder is the user's alone. A file's name is the SHA-256 of its bytes. It is fetched by one
process, to another name, and renamed when its digest was verified; who finds it later verifies it
again, as a disk may have damaged it. A fetch removes what no process asked for within a day; who
has mapped such a file keeps it.
"""

import hashlib
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

from infra.host_folder import locked, private_folder
from infra.settings import shown
from infra.store.object_store import ObjectStore, scan_checked

UNUSED_AFTER_S = 86_400.0
"""So long a file stays that no process asks for."""

FETCH_LIMIT_S = 3600.0
"""So long processes wait for the one that fetches: 100 GB at 30 MB/s."""


_BLOCK_BYTES = 2**23


def host_files_folder() -> Path:
    """Return the folder; PermissionError unless it is ours alone."""
    return private_folder("megahour-files")


def host_file(store: ObjectStore, uri: str, sha256: str) -> Path:
    """Return this host's copy of an object, which is fetched unless it is there, whole.

    ValueError for an object of another digest, and for a digest that is none, StoreError as the
    store raises it, and OSError with a remedy where there is no room.
    """
    # It names the copy: a forged manifest's must not leave the folder.
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"{uri}: sha256 = {shown(sha256)}: need 64 hexadecimal digits")
    folder = host_files_folder()
    path = folder / sha256
    # Asked for first: while its digest is computed, another process may remove what is unused.
    with suppress(FileNotFoundError):
        os.utime(path)
    if not _is_whole(path, sha256):
        with locked(folder / f"{sha256}.lock", FETCH_LIMIT_S):
            if not _is_whole(path, sha256):
                _remove_unused(folder)
                _fetch(store, uri, path)
    return path


def _is_whole(path: Path, sha256: str) -> bool:
    """Return whether the file is there, ours, and has this digest."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        is_ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        return is_ours and stat.S_ISREG(status.st_mode) and _digest(file) == sha256


def _digest(file: BufferedIOBase) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(store: ObjectStore, uri: str, path: Path) -> None:
    def copy(source: BinaryIO) -> None:
        descriptor, name = mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with os.fdopen(descriptor, "r+b") as file:
                shutil.copyfileobj(source, file, _BLOCK_BYTES)
                file.flush()
                file.seek(0)
                if (found := _digest(file)) != path.name:
                    raise ValueError(
                        f"SHA-256 is {found}, its manifest says {path.name}; the object was "
                        "altered or damaged: run its step again into a new --run"
                    )
                os.fchmod(descriptor, 0o400)
            Path(name).rename(path)
        finally:
            Path(name).unlink(missing_ok=True)

    try:
        scan_checked(store, uri, copy)
    except OSError as error:
        need = "need room for a copy of a stored object"
        raise OSError(f"{path.parent} cannot be written: {error.strerror}: {need}") from error


def _remove_unused(folder: Path) -> None:
    oldest_s = time.time() - UNUSED_AFTER_S
    for path in list(folder.iterdir()):
        with suppress(FileNotFoundError):  # removed by another process
            # A lock is as old as its first use, and may be held.
            if path.suffix != ".lock" and path.stat().st_mtime < oldest_s:
                path.unlink()
