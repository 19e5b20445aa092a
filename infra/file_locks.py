"""Locks on files: the kernel frees them when their process ends, however it ends."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, after waiting for it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def least_busy(directory: Path, names: Sequence[str]) -> Iterator[str]:
    """Take a slot of the name whose slots fewest hold, the first of equals; give the name."""
    with locked(directory / "choosing"):
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
