"""The requests that wait for a device, merged into batches of like length under a budget."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

_MAX_PADDED = 1.25
"""The frames with padding, for each without: a core computes padding like speech."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Request: an utterance that a client wants computed; `number` is the client's own."""

    client: int
    number: int
    num_frames: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Batch: requests that are computed together; an isolated one while no other is in work."""

    requests: Sequence[Request]
    is_isolated: bool = False

    @property
    def num_frames(self) -> int:
        """Return the frames without padding."""
        return sum(each.num_frames for each in self.requests)

    @property
    def num_padded_frames(self) -> int:
        """Return the frames with padding to the longest."""
        return len(self.requests) * max(each.num_frames for each in self.requests)


def choose_batch(waiting: Sequence[Request], max_frames: int) -> list[Request]:
    """Choose the oldest request and those nearest to it in length, oldest first among equals.

    Padded to the longest, a batch has at most `max_frames`, unless a single request has more, and
    at most a fifth of it is padding. As the oldest is in every batch, a request waits for no more
    batches than requests are before it.
    """
    oldest = waiting[0]
    batch, longest, num_frames = [oldest], oldest.num_frames, oldest.num_frames
    for each in sorted(waiting[1:], key=lambda other: abs(other.num_frames - oldest.num_frames)):
        padded = max(longest, each.num_frames) * (len(batch) + 1)
        if padded <= min(max_frames, _MAX_PADDED * (num_frames + each.num_frames)):
            batch.append(each)
            longest, num_frames = max(longest, each.num_frames), num_frames + each.num_frames
    return batch


class RequestQueue:
    """RequestQueue holds what waits for one device, safe for the threads of its server.

    Requests that failed together come back in batches that stay as they are, before all others.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._fixed: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._num_frames = 0

    @property
    def num_frames(self) -> int:
        """Return the frames that wait in all."""
        return self._num_frames

    def put(self, request: Request) -> None:
        """Add a request, which may be merged with others."""
        with self._changed:
            self._waiting.append(request)
            self._count(request.num_frames)

    def put_batch(self, batch: Batch) -> None:
        """Add requests that are computed together, and with no others."""
        with self._changed:
            self._fixed.append(batch)
            self._count(batch.num_frames)

    def put_back(self, batch: Batch) -> None:
        """Return requests to their places as the oldest, to be merged again."""
        with self._changed:
            self._waiting[:0] = batch.requests
            self._count(batch.num_frames)

    def _count(self, num_frames: int) -> None:
        self._num_frames += num_frames
        self._changed.notify()

    def take(self, max_frames: int) -> Batch:
        """Wait for a batch of at most `max_frames`, padded, and take it out."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._fixed)
            if self._fixed:
                batch = self._fixed.popleft()
            else:
                batch = Batch(choose_batch(self._waiting, max_frames))
                chosen = set(map(id, batch.requests))
                self._waiting = [each for each in self._waiting if id(each) not in chosen]
            self._num_frames -= batch.num_frames
            return batch

    def drop(self, client: int) -> None:
        """Take out all requests of a client that is gone."""
        with self._changed:
            self._waiting = _without(client, self._waiting)
            kept = (replace(each, requests=_without(client, each.requests)) for each in self._fixed)
            self._fixed = deque(each for each in kept if each.requests)
            self._num_frames = sum(each.num_frames for each in self._waiting)
            self._num_frames += sum(each.num_frames for each in self._fixed)


def _without(client: int, requests: Sequence[Request]) -> list[Request]:
    return [each for each in requests if each.client != client]
