"""A task's requests from when they are given until their answers are taken, in order."""

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TypeAlias

from infra.devices.messages import MAX_MESSAGE_BYTES

MAX_LOST_SERVERS = 3
"""A request fails when so many servers ended while they computed it, all but the first alone."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolRequest:
    """PoolRequest: what to compute, and its length in frames, by which batches are made."""

    num_frames: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """RequestFailure: why a request that was alone in its batch has no answer."""

    reason: str


PoolAnswer: TypeAlias = bytes | RequestFailure


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """Sent: a request's number, itself, and how many servers were lost while they computed it."""

    number: int
    request: PoolRequest
    num_lost: int = 0

    @property
    def is_alone(self) -> bool:
        """Return whether it may end its server, so that no others may share its batch."""
        return self.num_lost > 0


class InFlightRequests:
    """InFlightRequests: what waits, what each device has, and what is answered. Safe for threads.

    A device has at most `share_frames` at a time, or one request, so that others wait for the next
    device; and an equal part of what is not answered, so that all devices end at about one time.
    What a lost server had is sent again: what it computed at that moment alone, and after all
    others, the rest as before. Each request is answered once, whatever is sent twice.
    """

    def __init__(self, share_frames: int) -> None:
        self._share_frames = share_frames
        self.changed = threading.Condition()
        self._waiting: deque[Sent] = deque()
        self._sent: dict[str, dict[int, Sent]] = {}
        self._computing: dict[str, set[int]] = {}
        self._answers: dict[int, PoolAnswer] = {}
        self._frames: dict[int, int] = {}  # of what is not taken yet
        self._waiting_frames = 0
        self._sent_frames: dict[str, int] = {}

    def add(self, number: int, request: PoolRequest) -> None:
        """Add a request that waits for a device."""
        with self.changed:
            self._frames[number] = request.num_frames
            num_bytes = len(request.payload)
            if num_bytes > MAX_MESSAGE_BYTES:
                too_long = f"request of {num_bytes} bytes: need at most {MAX_MESSAGE_BYTES}"
                self._answers[number] = RequestFailure(too_long)
                return
            self._waiting.append(Sent(number, request))
            self._waiting_frames += request.num_frames

    def next_for(self, device: str, num_frames: int) -> list[Sent]:
        """Give a device requests of about so many frames, at least one if it may have any."""
        given: list[Sent] = []
        with self.changed:
            sent = self._sent.setdefault(device, {})
            self._sent_frames.setdefault(device, 0)
            while num_frames > 0 and self.has_for(device):
                each = self._waiting.popleft()
                num_frames -= max(1, each.request.num_frames)
                self._waiting_frames -= each.request.num_frames
                self._sent_frames[device] += each.request.num_frames
                given.append(each)
                sent[each.number] = each
        return given

    def has_for(self, device: str) -> bool:
        """Return whether a request waits that the device may have."""
        with self.changed:
            unanswered = self._waiting_frames + sum(self._sent_frames.values())
            equal_part = unanswered / max(1, len(self._sent_frames))
            has_room = self._sent_frames.get(device, 0) < min(self._share_frames, equal_part)
            return bool(self._waiting) and (has_room or not self._sent.get(device))

    def computing(self, device: str, number: int) -> None:
        """Note that a device's server took a request into a batch."""
        with self.changed:
            self._computing.setdefault(device, set()).add(number)

    def answer(self, device: str, number: int, answer: PoolAnswer) -> None:
        """Note a device's answer; one that was answered already, or not sent, is ignored."""
        with self.changed:
            self._computing.get(device, set()).discard(number)
            sent = self._sent.get(device, {}).pop(number, None)
            if sent is not None:
                self._sent_frames[device] -= sent.request.num_frames
                self._answers[number] = answer
                self.changed.notify_all()

    def lose(self, device: str, reason: str) -> None:
        """Let all that a device's server had wait again, or fail if it lost too many servers."""
        with self.changed:
            computing = self._computing.pop(device, set())
            self._waiting_frames += self._sent_frames.pop(device, 0)
            for number, each in reversed(self._sent.pop(device, {}).items()):
                if number not in computing:
                    self._waiting.appendleft(each)
                elif each.num_lost + 1 < MAX_LOST_SERVERS:
                    self._waiting.append(replace(each, num_lost=each.num_lost + 1))
                else:
                    text = f"its server ended {MAX_LOST_SERVERS} times, at last: {reason}"
                    self._answers[number] = RequestFailure(text)
                    self._waiting_frames -= each.request.num_frames
            self.changed.notify_all()

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
        """Return the number of requests that no device has."""
        return len(self._waiting)

    @property
    def num_waiting_frames(self) -> int:
        """Return the frames of the requests that no device has."""
        with self.changed:
            return self._waiting_frames
