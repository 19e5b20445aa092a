"""Bound the bytes that fetched objects hold in memory together, and each by its own limit."""

import threading
from dataclasses import dataclass, field

from infra.store.objects import ObjectTooLarge


class NoRoomError(Exception):
    """NoRoomError says that an object does not fit beside those in memory; fetch it alone."""


@dataclass(frozen=True, slots=True)
class SizeBound:
    """SizeBound holds the bytes that an object probably has, and those above which it is refused.

    What is expected bounds the requests in flight, before any size is known.
    """

    expected_bytes: int = 0
    max_bytes: int | None = None


class ByteBudget:
    """ByteBudget counts the bytes in memory, from several threads, against a total."""

    def __init__(self, total: int) -> None:
        self._total, self._used = total, 0
        self._lock = threading.Lock()

    def grow(self, held: int, more: int) -> bool:
        """Count `more` bytes for an object that holds `held`; False if they do not fit.

        They always fit where no other object holds any.
        """
        with self._lock:
            fits = self._used == held or self._used + more <= self._total
            if fits:
                self._used += more
            return fits

    def give_back(self, held: int) -> None:
        """Count `held` bytes less."""
        with self._lock:
            self._used -= held


@dataclass(slots=True)
class Reservation:
    """Reservation holds one object's share of a budget, from its request until it is consumed."""

    budget: ByteBudget
    uri: str
    bound: SizeBound
    held: int = field(default=0, init=False)

    def enter(self) -> bool:
        """Reserve the expected bytes; return whether they fit."""
        return self._hold(self.bound.expected_bytes)

    def admit(self, num_bytes: int) -> None:
        """Reserve the bytes that the object really has, or raise NoRoomError or ObjectTooLarge."""
        self.require_bound(num_bytes)
        if not self._hold(num_bytes):
            raise NoRoomError(f"{self.uri}: no room for {num_bytes} bytes")

    def require_bound(self, num_bytes: int) -> None:
        """Raise ObjectTooLarge for more bytes than the object may have."""
        max_bytes = self.bound.max_bytes
        if max_bytes is not None and num_bytes > max_bytes:
            raise ObjectTooLarge(f"{self.uri}: {num_bytes} bytes: need at most {max_bytes}")

    def leave(self) -> None:
        """Give the bytes back, when the object has been consumed."""
        self.budget.give_back(self.held)
        self.held = 0

    def _hold(self, num_bytes: int) -> bool:
        more = max(num_bytes - self.held, 0)
        fits = self.budget.grow(self.held, more)
        self.held += more if fits else 0
        return fits
