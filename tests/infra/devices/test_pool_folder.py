"""The folder of a device pool, held and removed by many processes, and its lock."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra.devices.device_pool import held, remove_abandoned
from infra.host_folder import locked


def test_a_folder_that_is_removed_and_held_at_once_is_there(tmp_path: Path) -> None:
    """Of 500 holders beside a process that removes all it can, each has its folder."""
    program = "import sys; from pathlib import Path; from infra.devices import device_pool\n"
    program += "while True: device_pool.remove_abandoned(Path(sys.argv[1]))"
    remover = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        for _ in range(500):
            with held(tmp_path / "pool"):
                (tmp_path / "pool" / "file").write_bytes(b"")
    finally:
        remover.kill()
        remover.wait()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


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
