"""The batches that wait for a device, first come, first served."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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
