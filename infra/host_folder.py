"""Share folders of this host among the processes of a user; lock and replace their files.

The kernel frees the locks of a process that ends, even of one that is killed.
"""

import fcntl
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Not TMPDIR, which may differ between the executors of a host.
_TEMPORARY = Path("/tmp")  # noqa: S108 - the directory below it is checked to be ours alone
_POLL_INTERVAL_S = 0.02


def private_folder(name: str) -> Path:
    """Return this user's folder of that name, which is made; PermissionError if it is not ours."""
    ours = _TEMPORARY / f"{name}-{os.getuid()}"
    ours.mkdir(mode=0o700, exist_ok=True)
    status = ours.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{ours}: need a directory that is ours alone (mode 700): remove it")
    return ours


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` that replaces it at the end: readers see one of them whole."""
    partial = path.with_name(f".partial-{uuid.uuid4().hex}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, limit_s: float) -> Iterator[None]:
    """Wait for the lock of `path` and hold it; raise TimeoutError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"{path}: locked by others for {limit_s:g} s: end them (fuser names them)"
            )
        time.sleep(_POLL_INTERVAL_S)
    try:
        yield
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of `path` until it is closed, if none holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
