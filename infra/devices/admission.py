"""Admission of batches to a server's queue, which stays full, bounded and fair to clients."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Admission:
    """Admission asks clients in turn for frames, while fewer than `max_frames` wait.

    Each client has one question at a time, for an equal share of the room, or for a batch of
    `batch_frames`; so a client with many batches keeps no other from the device. Batches are whole,
    so that an answer may have a batch more than was asked. `ask` sends a client the question for so
    many frames. Safe for threads.
    """

    batch_frames: int
    max_frames: int
    waiting: Callable[[], int]
    ask: Callable[[int, int], None]
    _ready: deque[int] = field(default_factory=deque)
    _asked: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self, client: int) -> None:
        """Note that a client has batches."""
        with self._lock:
            if client not in self._ready and client not in self._asked:
                self._ready.append(client)
        self.fill()

    def sent(self, client: int, has_more: bool) -> None:
        """Note that a client answered its question, and whether it has more."""
        with self._lock:
            self._asked.pop(client, None)
            if has_more and client not in self._ready:
                self._ready.append(client)
        self.fill()

    def gone(self, client: int) -> None:
        """Forget a client."""
        with self._lock:
            self._asked.pop(client, None)
            if client in self._ready:
                self._ready.remove(client)
        self.fill()

    def fill(self) -> None:
        """Ask the clients that are ready, the one that waits longest first."""
        with self._lock:
            while self._ready:
                room = self.max_frames - self.waiting() - sum(self._asked.values())
                if room <= 0:
                    return
                share = max(-(-room // len(self._ready)), self.batch_frames)
                client = self._ready.popleft()
                self._asked[client] = share
                self.ask(client, share)
