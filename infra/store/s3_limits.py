"""Adapt a host's request rates to what a throttling store serves: AIMD, as in TCP.

Additive increase while the store serves all, multiplicative decrease when it throttles (Chiu and
Jain, 1989). The cut is to the share that was served, as DCTCP's (Alizadeh et al., 2010), and the
increase grows with the time since the last cut, as H-TCP's (Leith and Shorten, 2004).
A store limits rates, so the rate is adapted; concurrency is rate x latency by Little's law.

The host's processes share the rates in a small file, of which each locks the part that it needs. A
process holds nothing between its turn and the answer, so one that is killed leaves nothing to
give back: at most the turn that it had taken passes unused, and the kernel frees its locks.
"""

import fcntl
import hashlib
import math
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from botocore.exceptions import ClientError

from infra.host_folder import private_folder
from infra.store.retry import Patience, is_in_vain
from infra.store.s3_errors import NoTurnError, is_throttled

FIRST_PER_S = 5500.0
"""The reads a second that S3 grants a prefix: the limit that the first throttled answer sets."""

LEAST_PER_S = 1.0
"""While a store throttles everything, a host asks this often for each prefix."""

LEAST_SERVED_PER_S = 20.0
"""While it serves some, a host asks this often: 503s that no rate causes would else stop it."""

INCREASE_PER_S = 2.0
WINDOW_S = 0.5
"""Answers of so many seconds make one decision."""

_LEAST_SHARE = 0.1  # one window may be bad luck
_PRESSED_SHARE = 0.7  # below it a limit does not limit, and is no reason for a higher one
_FORGET_S = 60.0
_FARTHEST_TURN_S = 300.0


class RequestRate(NamedTuple):
    """RequestRate is one host's limit for one prefix, with what it saw since its window began.

    `per_s` is 0 for no limit. Times are seconds of one clock for all of the host's processes.
    """

    per_s: float = 0.0
    next_turn_s: float = 0.0
    window_s: float = 0.0
    num_sent: float = 0.0
    num_served: float = 0.0
    num_throttled: float = 0.0
    cut_s: float = 0.0
    throttled_s: float = 0.0
    served_s: float = 0.0

    @property
    def is_limited(self) -> bool:
        """Return whether requests must wait for their turns."""
        return self.per_s > 0.0

    def is_valid(self, now_s: float) -> bool:
        """Return whether such a rate can have been stored by one of us before `now_s`."""
        times = (self.window_s, self.cut_s, self.throttled_s, self.served_s)
        counts = (self.num_sent, self.num_served, self.num_throttled)
        return (
            all(map(math.isfinite, self))
            and (self.per_s == 0.0 or self.per_s >= LEAST_PER_S)
            and all(0.0 <= time_s <= now_s for time_s in times)
            and all(count >= 0.0 for count in counts)
            and self.next_turn_s <= now_s + _FARTHEST_TURN_S
        )


UNLIMITED = RequestRate()


def take_turn(rate: RequestRate, now_s: float) -> tuple[RequestRate, float]:
    """Return the time at which the next request may be sent, and the rate after it."""
    if not rate.is_limited or now_s - rate.throttled_s > _FORGET_S:
        return UNLIMITED, now_s
    turn_s = max(now_s, rate.next_turn_s)
    sent = rate.num_sent + 1.0
    return rate._replace(next_turn_s=turn_s + 1.0 / rate.per_s, num_sent=sent), turn_s


def after_answer(rate: RequestRate, now_s: float, sent_s: float, is_throttled: bool) -> RequestRate:
    """Return the rate after an answer, throttled or not, to a request that was sent at `sent_s`."""
    if not rate.is_limited:
        first = RequestRate(FIRST_PER_S, now_s, now_s, cut_s=now_s, throttled_s=now_s)
        return first if is_throttled else rate
    counts = sent_s >= rate.cut_s  # an earlier one says what the rate was cut for
    if is_throttled:
        rate = rate._replace(throttled_s=now_s, num_throttled=rate.num_throttled + counts)
    else:
        rate = rate._replace(served_s=now_s, num_served=rate.num_served + counts)
    if not counts:
        return rate
    return rate if now_s - rate.window_s < WINDOW_S else _decide(rate, now_s)


def _decide(rate: RequestRate, now_s: float) -> RequestRate:
    sent_per_s = rate.num_sent / (now_s - rate.window_s)
    per_s, cut_s = rate.per_s, rate.cut_s
    if rate.num_throttled:
        share = rate.num_served / (rate.num_served + rate.num_throttled)
        least_per_s = LEAST_SERVED_PER_S if share else LEAST_PER_S
        per_s = max(min(per_s, sent_per_s) * max(share, _LEAST_SHARE), least_per_s)
        cut_s = now_s
    elif sent_per_s >= _PRESSED_SHARE * per_s:
        per_s += _increase_per_s(now_s - rate.throttled_s)
    return rate._replace(
        per_s=per_s, window_s=now_s, num_sent=0.0, num_served=0.0, num_throttled=0.0, cut_s=cut_s
    )


def _increase_per_s(since_throttled_s: float) -> float:
    """Return H-TCP's increase for one window (its equation 3), steeper as time passes."""
    return INCREASE_PER_S * (1.0 + 10.0 * since_throttled_s + (since_throttled_s / 2.0) ** 2)


R = TypeVar("R")

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
                cell, lambda rate, now_s: (after_answer(rate, now_s, sent_s, is_throttled), None)
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
    try:
        return SharedRates(private_folder("megahour-store") / "rates")
    except OSError:  # there is none, or it is open to others
        return SharedRates(None)
