"""A file lock has one holder at a time, and waiting for it has a limit."""

import threading
import time
from pathlib import Path

import pytest

from infra.devices.pool_folder import locked


def test_a_lock_that_is_never_freed_is_given_up(tmp_path: Path) -> None:
    """After the limit TimeoutError names the path; the holder keeps the lock."""
    path = tmp_path / "lock"
    with locked(path, 1.0):
        began = time.monotonic()
        with (
            pytest.raises(TimeoutError, match=r"lock: locked by others for 0.1 s"),
            locked(path, 0.1),
        ):
            pass
        assert time.monotonic() - began < 30


def test_a_lock_that_is_freed_is_taken(tmp_path: Path) -> None:
    """Waiting ends when the holder frees the lock, long before the limit."""
    path = tmp_path / "lock"
    taken, freed = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(path, 1.0):
            taken.set()
            freed.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(30)
    threading.Timer(0.1, freed.set).start()
    with locked(path, 30.0):
        assert freed.is_set()
    holder.join(30)
