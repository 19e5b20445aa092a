"""The batches that wait for a device, first come, first served, and questions for more of them."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infra.devices.batches import PoolRequest


@dataclass(frozen=True, slots=True, eq=False)
class QueuedBatch:
    """QueuedBatch: a client's batch, by the client's own number, which no other batch changes.

    An isolated one is computed while no other is in work.
    """

    client: int
    number: int
    requests: Sequence[PoolRequest]
    is_isolated: bool = False

    @property
    def num_frames(self) -> int:
        """Return the frames without padding."""
        return sum(each.num_frames for each in self.requests)


class RequestQueue:
    """RequestQueue holds what waits for one device, safe for the threads of its server."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedBatch] = deque()
        self._changed = threading.Condition()

    @property
    def num_frames(self) -> int:
        """Return the frames that wait in all."""
        with self._changed:
            return sum(each.num_frames for each in self._waiting)

    def put(self, batch: QueuedBatch) -> None:
        """Add a batch, as the last."""
        with self._changed:
            self._waiting.append(batch)
            self._changed.notify()

    def put_first(self, batch: QueuedBatch) -> None:
        """Return a batch that was taken, before all others."""
        with self._changed:
            self._waiting.appendleft(batch)
            self._changed.notify()

    def take(self) -> QueuedBatch:
        """Wait for a batch, and take it out."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.popleft()

    def drop(self, client: int) -> None:
        """Take out all batches of a client that is gone."""
        with self._changed:
            self._waiting = deque(each for each in self._waiting if each.client != client)


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
