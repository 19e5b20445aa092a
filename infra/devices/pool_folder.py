"""Share a device pool's folder among processes by lock files.

The kernel frees the locks of a process that ends, even of one that is killed. The folder is held
while any process uses it, and removed when none does.
"""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from infra.host_folder import locked, try_lock

_CHOOSING_LIMIT_S = 60.0  # choosing takes a millisecond


@contextmanager
def least_busy(directory: Path, names: Sequence[str]) -> Iterator[str]:
    """Hold a slot of the name with the fewest held slots, the first of equals; yield the name."""
    with locked(directory / "choosing", _CHOOSING_LIMIT_S):
        name = min(names, key=lambda name: _num_held(directory, name))
        attempts = (try_lock(directory / f"{name}.slot-{number}") for number in count())
        slot = next(slot for slot in attempts if slot is not None)
    try:
        yield name
    finally:
        os.close(slot)


def _num_held(directory: Path, name: str) -> int:
    slots = [try_lock(path) for path in directory.glob(f"{name}.slot-*")]
    for slot in slots:
        if slot is not None:
            os.close(slot)
    return slots.count(None)


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
            descriptor = _open_folder(folder)
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
    descriptor = _open_folder(folder)
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


def _open_folder(folder: Path) -> int:
    return os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_in(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / _IN_USE).stat())
    except FileNotFoundError:
        return False
