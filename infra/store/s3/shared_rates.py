"""Share a host's rates of requests among its processes, in a small file that they lock by parts.

Nothing is held between a turn and its answer, so a killed process leaves nothing to give back: at
most the one turn that it had taken passes unused. The kernel frees the locks of a killed process.
"""

import fcntl
import hashlib
import os
import stat
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from botocore.exceptions import ClientError

from infra.store.request_rate import UNLIMITED, RequestRate, after_answer, take_turn
from infra.store.retry import Patience, is_in_vain
from infra.store.s3.errors import NoTurnError, is_throttled

R = TypeVar("R")

# Not TMPDIR, which may differ between the executors of a host.
_TEMPORARY = Path("/tmp")  # noqa: S108 - the directory below it is checked to be ours alone
_CELL = struct.Struct(f"<{len(UNLIMITED)}d")
_NUM_CELLS = 2**16  # 4.7 MB of holes; of 64 prefixes some two share a rate in one case of 30
_LOCK_PATIENCE_S = 1.0
_LOCK_INTERVAL_S = 0.0002
_LINE_INTERVAL_S = 1.0


class SharedRates:
    """SharedRates holds the rate of each key, for the processes that open the same file.

    Where the file cannot be used, a process keeps its rates for itself, and adapts them alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._descriptor = _open(path)
        self._lock = threading.Lock()
        self._lines: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._cells: dict[int, bytes] = {}

    def wait_for_turn(self, key: str, begun_s: float) -> float:
        """Wait until an operation that began at `begun_s` may send a request; return the seconds.

        Raises NoTurnError when the operation should wait no longer.
        """
        cell, waits_s = _cell_of(key), time.monotonic()
        if not self._read(cell).is_limited:
            return 0.0
        # One thread of a process at a time takes a turn, so that turns are taken shortly before
        # they are used: a new rate soon holds for all, and the processes take turns evenly.
        while not self._lines[cell].acquire(timeout=_LINE_INTERVAL_S):
            elapsed_s = time.monotonic() - begun_s
            if is_in_vain(elapsed_s, self.unserved_s(key, begun_s)):
                raise NoTurnError(f"no turn among the host's requests in {elapsed_s:.0f} s")
        try:
            turn_s = self._update(cell, take_turn)
            time.sleep(max(turn_s - time.monotonic(), 0.0))
        finally:
            self._lines[cell].release()
        return time.monotonic() - waits_s

    def count_answer(self, key: str, sent_s: float, is_throttled: bool) -> None:
        """Count the answer to a request of this key that was sent at `sent_s`."""
        cell = _cell_of(key)
        if is_throttled or self._read(cell).is_limited:
            self._update(
                cell,
                lambda rate, now_s: (after_answer(rate, now_s, sent_s, is_throttled), None),
            )

    def unserved_s(self, key: str, begun_s: float) -> float:
        """Return the seconds since `begun_s` in which no request of the key was served."""
        return time.monotonic() - max(begun_s, self._read(_cell_of(key)).served_s)

    def _update(
        self, cell: int, change: Callable[[RequestRate, float], tuple[RequestRate, R]]
    ) -> R:
        with self._lock, self._locked(cell):
            rate, result = change(self._read(cell), time.monotonic())
            self._write(cell, _CELL.pack(*rate))
        return result

    def _read(self, cell: int) -> RequestRate:
        descriptor = self._descriptor
        if descriptor is None:
            packed = self._cells.get(cell, b"")
        else:
            packed = os.pread(descriptor, _CELL.size, cell * _CELL.size)
        if len(packed) < _CELL.size:  # beyond the end: no process was throttled there
            return UNLIMITED
        rate = RequestRate(*_CELL.unpack(packed))
        return rate if rate.is_valid(time.monotonic()) else UNLIMITED

    def _write(self, cell: int, packed: bytes) -> None:
        if self._descriptor is not None:
            try:
                os.pwrite(self._descriptor, packed, cell * _CELL.size)
            except OSError:  # a full disk
                self._descriptor = None
        if self._descriptor is None:
            self._cells[cell] = packed

    @contextmanager
    def _locked(self, cell: int) -> Iterator[None]:
        """Lock the cell against other processes; proceed without where one of them is stopped."""
        descriptor = self._descriptor
        if descriptor is None:
            yield
            return
        place = (_CELL.size, cell * _CELL.size)
        deadline_s = time.monotonic() + _LOCK_PATIENCE_S
        while not _try_lock(descriptor, *place) and time.monotonic() < deadline_s:
            time.sleep(_LOCK_INTERVAL_S)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.lockf(descriptor, fcntl.LOCK_UN, *place)


class PacedRequests(Patience):
    """PacedRequests sends one operation's requests, each in its turn.

    `place` names what the store may throttle apart from other places.
    """

    def __init__(self, rates: SharedRates, place: str) -> None:
        self._rates, self._place = rates, place
        self._key = place
        self._begun_s = time.monotonic()
        self._waited_s = 0.0

    def send(self, endpoint: str, request: Callable[[], R]) -> R:
        """Send one request to an endpoint, and count its answer if one comes."""
        self._key = f"{endpoint} {self._place}"
        self._waited_s += self._rates.wait_for_turn(self._key, self._begun_s)
        sent_s = time.monotonic()
        try:
            result = request()
        except Exception as error:
            if isinstance(error, ClientError):
                self._rates.count_answer(self._key, sent_s, is_throttled(error))
            raise
        self._rates.count_answer(self._key, sent_s, is_throttled=False)
        return result

    def is_throttled(self, error: Exception) -> bool:
        """Return whether the store asks for fewer requests."""
        return is_throttled(error)

    def waited_s(self) -> float:
        """Return the seconds that the operation has waited for its turns."""
        return self._waited_s

    def unserved_s(self) -> float:
        """Return the seconds in which the store has served none of the host's operations."""
        return self._rates.unserved_s(self._key, self._begun_s)


def place_of(kind: str, bucket: str, key: str) -> str:
    """Name the part of a bucket that has a rate of its own: the key's first two folders.

    S3 parts a bucket by prefixes that it does not state, of any length. Two folders part a corpus
    from its neighbours and a run from others. Finer names would divide one limit among many
    rates, each of which probes for more; reads and writes have limits of their own.
    """
    return "/".join([kind, bucket, *key.split("/")[:-1][:2]])


def _try_lock(descriptor: int, num_bytes: int, start: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, start)
    except (BlockingIOError, PermissionError):  # another process holds it
        return False
    except OSError:  # a file system without locks: the rate is then a little off
        return True
    return True


@lru_cache
def _cell_of(key: str) -> int:
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _NUM_CELLS


def _open(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def rates_of_host() -> SharedRates:
    """Open the rates that this user's processes on this host share."""
    ours = _TEMPORARY / f"megahour-store-{os.getuid()}"
    try:
        ours.mkdir(mode=0o700, exist_ok=True)
        status = ours.lstat()
    except OSError:
        return SharedRates(None)
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return SharedRates(ours / "rates" if is_ours and not status.st_mode & 0o077 else None)
