"""Lock files; the kernel frees the locks of a process that ends, even one that is killed."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_POLL_INTERVAL_S = 0.02
_CHOOSING_LIMIT_S = 60.0  # choosing takes a millisecond


@contextmanager
def locked(path: Path, limit_s: float) -> Iterator[None]:
    """Wait for the lock of `path` and hold it; raise TimeoutError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"{path}: locked by others for {limit_s:g} s: end them (fuser names them)"
            )
        time.sleep(_POLL_INTERVAL_S)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def least_busy(directory: Path, names: Sequence[str]) -> Iterator[str]:
    """Hold a slot of the name with the fewest held slots, the first of equals; yield the name."""
    with locked(directory / "choosing", _CHOOSING_LIMIT_S):
        name = min(names, key=lambda name: _num_held(directory, name))
        slot = _take_free_slot(directory, name)
    try:
        yield name
    finally:
        os.close(slot)


def _num_held(directory: Path, name: str) -> int:
    slots = [_try_lock(path) for path in directory.glob(f"{name}.slot-*")]
    for slot in slots:
        if slot is not None:
            os.close(slot)
    return slots.count(None)


def _take_free_slot(directory: Path, name: str) -> int:
    attempts = (_try_lock(directory / f"{name}.slot-{number}") for number in count())
    return next(slot for slot in attempts if slot is not None)


def _try_lock(path: Path) -> int | None:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
