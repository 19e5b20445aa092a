"""Hold the folder of a device pool while a process uses it, and remove it when none does."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_IN_USE = "in_use"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make `folder` and keep `remove_abandoned` from it; the kernel frees what a killed one held.

    Clients hold it during a request, servers as long as they live.
    """
    descriptor = _hold(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _hold(folder: Path) -> int:
    while True:
        with suppress(FileExistsError):  # Path.mkdir(exist_ok) fails if it is removed meanwhile
            folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # it was removed at this moment
            descriptor = _open(folder)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_in(folder, descriptor):
                return descriptor
            os.close(descriptor)


def remove_abandoned(folders: Path) -> None:
    """Remove each of `folders` that no process holds, such as one whose server was killed."""
    for folder in list(folders.iterdir()):
        with suppress(OSError):  # held, or removed by another process
            _remove(folder)


def _remove(folder: Path) -> None:
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_in(folder, descriptor):
            return
        # Renamed first: who holds its name from now on makes a new folder.
        removed = folder.with_name(f".removed-{uuid.uuid4().hex}")
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_in(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / _IN_USE).stat())
    except FileNotFoundError:
        return False
