"""A task's batches from when they are given until their answers are taken, in order."""

import threading
from collections import deque
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

from infra.devices.batches import Batch

MAX_LOST_SERVERS = 3
"""A request fails when so many servers ended while they computed it, at last without company."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """RequestFailure: why a request that was alone in its batch has no answer."""

    reason: str


PoolAnswer: TypeAlias = bytes | RequestFailure


class InFlightRequests:
    """InFlightRequests: what waits, what each device has, and what is answered. Safe for threads.

    A device has at most `share` batches at a time, so that others wait for the next device; and an
    equal part of those that are not answered, so that all devices end at about one time.
    What a lost server had is sent again as it was: what it computed at that moment after all others
    and isolated, the rest as before. A batch is divided by its order alone, and only if it cannot
    be computed: in halves if it failed, and request by request if a second server ended with it.
    Each request is answered once, whatever is sent twice.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self.changed = threading.Condition()
        self._waiting: deque[Batch] = deque()
        self._sent: dict[str, dict[int, Batch]] = {}
        self._sendings = count()
        self._computing: dict[str, set[int]] = {}
        self._received: dict[int, list[PoolAnswer]] = {}  # of batches that are not answered whole
        self._answers: dict[int, PoolAnswer] = {}
        self._frames: dict[int, int] = {}  # of what is not taken yet

    def add(self, batch: Batch) -> None:
        """Add a batch that waits for a device."""
        with self.changed:
            for number, request in zip(batch.numbers, batch.requests, strict=True):
                self._frames[number] = request.num_frames
            self._waiting.append(batch)

    def refuse(self, number: int, reason: str) -> None:
        """Let a request fail that was in no batch."""
        with self.changed:
            self._frames[number] = 0
            self._answers[number] = RequestFailure(reason)

    def next_for(self, device: str, num_frames: int) -> list[tuple[int, Batch]]:
        """Give a device numbered batches of about so many frames, or one, if it may have any."""
        given: list[tuple[int, Batch]] = []
        with self.changed:
            sent = self._sent.setdefault(device, {})
            while num_frames > 0 and self.has_for(device):
                number, batch = next(self._sendings), self._waiting.popleft()
                num_frames -= max(1, batch.num_frames)
                given.append((number, batch))
                sent[number] = batch
        return given

    def has_for(self, device: str) -> bool:
        """Return whether a batch waits that the device may have."""
        with self.changed:
            num_sent = len(self._sent.get(device, ()))
            unanswered = len(self._waiting) + sum(map(len, self._sent.values()))
            equal_part = unanswered / max(1, len(self._sent))
            has_room = num_sent < min(self._share, equal_part)
            return bool(self._waiting) and (has_room or not num_sent)

    def computing(self, device: str, number: int) -> None:
        """Note that a device's server began to compute a batch."""
        with self.changed:
            self._computing.setdefault(device, set()).add(number)

    def answer(self, device: str, number: int, answer: PoolAnswer) -> bool:
        """Note a device's answer to a batch's next request; return whether it was the last.

        An answer to a batch that the device does not have is ignored. A request that fails beside
        others is sent once more alone: a neighbour may have spoiled it.
        """
        with self.changed:
            batch = self._sent.get(device, {}).get(number)
            if batch is None:
                return False
            received = self._received.setdefault(number, [])
            received.append(answer)
            if len(received) < len(batch.requests):
                return False
            self._settle(device, number)
            for single, each in zip(batch.singles(), received, strict=True):
                if isinstance(each, RequestFailure) and len(received) > 1:
                    self._waiting.append(single)
                else:
                    self._answers[single.numbers[0]] = each
            self.changed.notify_all()
            return True

    def fail(self, device: str, number: int, reason: str) -> bool:
        """Divide a batch that a device cannot compute, or let a request that was alone fail.

        Returns whether it was alone.
        """
        with self.changed:
            batch = self._settle(device, number)
            is_alone = len(batch.requests) == 1
            if is_alone:
                self._answers[batch.numbers[0]] = RequestFailure(reason)
            else:
                self._waiting.extend(batch.halves())
            self.changed.notify_all()
            return is_alone

    def lose(self, device: str, reason: str) -> None:
        """Let all that a device's server had wait again, or fail if it lost too many servers."""
        with self.changed:
            computing = self._computing.pop(device, set())
            for number, batch in reversed(self._sent.pop(device, {}).items()):
                self._received.pop(number, None)
                lost = replace(batch, num_lost=batch.num_lost + 1)
                if number not in computing:
                    self._waiting.appendleft(batch)
                elif lost.num_lost == 1:
                    self._waiting.append(lost)
                elif lost.num_lost < MAX_LOST_SERVERS:
                    self._waiting.extend(lost.singles())
                else:
                    ended = f"its server ended {MAX_LOST_SERVERS} times, at last: {reason}"
                    self._answers[lost.numbers[0]] = RequestFailure(ended)
            self.changed.notify_all()

    def _settle(self, device: str, number: int) -> Batch:
        self._computing.get(device, set()).discard(number)
        self._received.pop(number, None)
        return self._sent[device].pop(number)

    def take(self, number: int, limit_s: float = 0.0) -> PoolAnswer | None:
        """Take an answer out, if there is one within the limit."""
        with self.changed:
            self.changed.wait_for(lambda: number in self._answers, limit_s)
            answer = self._answers.pop(number, None)
            if answer is not None:
                del self._frames[number]
            return answer

    @property
    def num_frames(self) -> int:
        """Return the frames of all requests whose answers are not taken."""
        return sum(self._frames.values())

    @property
    def num_waiting(self) -> int:
        """Return the number of batches that no device has."""
        return len(self._waiting)

    @property
    def num_waiting_frames(self) -> int:
        """Return the frames of the batches that no device has."""
        with self.changed:
            return sum(each.num_frames for each in self._waiting)
