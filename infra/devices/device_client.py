"""Send a task's requests to its host's device servers, and yield the answers in order.

A link is the conversation with one server, and starts the server again when it is lost. What a lost
server had is sent again, but each request is answered once.
"""

import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeAlias

from infra.devices.device_pool import DeviceError, DevicePool, ServerLostError, kill_server
from infra.devices.messages import (
    MAX_MESSAGE_BYTES,
    Batch,
    Kind,
    Message,
    MessageError,
    PoolRequest,
    form_batches,
    receive_message,
    send_message,
)
from infra.spark.task_resources import task_devices
from infra.task_metrics import FAULTS, FaultKind

MAX_LOST_SERVERS = 3
"""A request fails once this many servers have ended while computing it, the last for it alone."""


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


SILENCE_LIMIT_S = 10.0
"""A server that lives says so every second."""

MAX_STARTS = 2
MAX_LOSSES = 4
"""A device is left out after so many lost servers in succession, without an answer of theirs."""

_RESTART_AFTER_S = 0.5


@dataclass(eq=False)
class ServerLink:
    """ServerLink sends a device's server the batches it asks for, and notes what it answers.

    `run` returns when the link is closed, or why the device cannot be used. `lost` is called when
    batches wait again.
    """

    pool: DevicePool
    device: str
    in_flight: InFlightRequests
    lost: Callable[[], None]
    connected_at_s: float | None = None
    _connection: socket.socket | None = None
    _is_closed: bool = False
    _is_hungry: bool = True
    _num_losses: int = 0
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> str:
        """Serve the server's questions until the link is closed; return why it ended before."""
        num_starts = 0
        while not self._is_closed:
            try:
                connection = self.pool.connect(self.device)
            except (ServerLostError, DeviceError, OSError) as error:
                num_starts += 1
                if num_starts == MAX_STARTS:
                    return str(error)
                continue
            num_starts = 0
            with connection:
                reason = self._converse(connection)
            if self._is_closed:
                break
            self._num_losses += 1
            FAULTS.add(self.device, "server lost", reason)
            self.in_flight.lose(self.device, reason)
            self.lost()
            if self._num_losses == MAX_LOSSES:
                return reason
            time.sleep(_RESTART_AFTER_S)
        return ""

    def offer(self) -> None:
        """Tell the server that batches wait which it may have, unless it knows."""
        if not self.in_flight.has_for(self.device):
            return
        with self._sending, suppress(OSError):  # the other thread finds out
            if self._connection is not None and self._is_hungry:
                self._is_hungry = False
                send_message(self._connection, Message(Kind.READY))

    def close(self) -> None:
        """End the conversation."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _converse(self, connection: socket.socket) -> str:
        connection.settimeout(SILENCE_LIMIT_S)
        self._is_hungry, self._connection = True, connection
        self.connected_at_s = time.monotonic()
        try:
            self.offer()
            while not self._is_closed:
                self._obey(receive_message(connection))
        except TimeoutError:
            kill_server(connection)
            return f"its server was silent for {SILENCE_LIMIT_S:g} s, so it was killed"
        except MessageError as error:
            return f"its server sent what it cannot have meant: {error}"
        except (EOFError, OSError):
            return f"its server ended: {self.pool.last_words(self.device)}"
        finally:
            with self._sending:
                self._connection = self.connected_at_s = None
        return ""

    def _obey(self, message: Message) -> None:
        match message.kind:
            case Kind.WANT:
                self._send_batches(message.num_frames)
            case Kind.TAKEN:
                self.in_flight.computing(self.device, message.number)
            case Kind.ANSWER:
                self._note(message.number, bytes(message.body))
            case Kind.FAILURE:
                self._note(message.number, RequestFailure(_text(message)))
            case Kind.OUT_OF_MEMORY:
                self._divide(message, "out of memory")
            case Kind.BATCH_FAILED:
                self._divide(message, "batch failed")
            case Kind.BEAT:
                pass
            case other:
                raise MessageError(f"message of kind {other}: need one of a server")

    def _note(self, number: int, answer: PoolAnswer) -> None:
        self._num_losses = 0
        if self.in_flight.answer(self.device, number, answer):
            self.offer()  # it may have more for what it answered

    def _divide(self, message: Message, kind: FaultKind) -> None:
        reason = _text(message)
        is_alone = self.in_flight.fail(self.device, message.number, reason)
        # That a request fails alone is its own fault, unless it lacks memory.
        if not is_alone or kind == "out of memory":
            FAULTS.add(self.device, kind, reason)
        self.offer()

    def _send_batches(self, num_frames: int) -> None:
        given = self.in_flight.next_for(self.device, num_frames)
        assert self._connection is not None
        with self._sending:
            for number, batch in given:
                for each in batch.requests:
                    request = Message(Kind.REQUEST, number, each.num_frames, each.payload)
                    send_message(self._connection, request)
                kind = Kind.ISOLATED_BATCH if batch.num_lost else Kind.BATCH
                send_message(self._connection, Message(kind, number))
            has_more = self.in_flight.has_for(self.device)
            self._is_hungry = not has_more
            send_message(self._connection, Message(Kind.SENT, num_frames=int(has_more)))


def _text(message: Message) -> str:
    return bytes(message.body).decode(errors="replace")


LOOK_AHEAD_BATCHES = 6
"""The frames among which like lengths are found, in batches. Another number makes other batches."""

_IN_FLIGHT_BATCHES = 6
_OPEN_AFTER_S = 0.2  # in which batches have waited that no server asks for
_POLL_INTERVAL_S = 0.1
_SHARE_BATCHES = 3  # one for each thread of a server; what is beyond waits for another device
_CLOSE_LIMIT_S = 5.0


class RequestStream:
    """RequestStream forms a task's batches, and keeps them in flight to its host's devices.

    The requests alone decide which of them are a batch: neither the devices nor other tasks do. A
    request has at most `longest_frames`, or fits into a batch. Devices are opened one by one, the
    least busy first, while batches wait that no server asks for. A device that cannot be used is
    left out, and a line on standard error says why.
    """

    def __init__(self, pool: DevicePool, longest_frames: int = 0) -> None:
        self._pool = pool
        self._devices = task_devices(pool.devices)
        longest = max(pool.batch_frames, longest_frames)
        self._look_ahead_frames = LOOK_AHEAD_BATCHES * longest
        self._in_flight_frames = _IN_FLIGHT_BATCHES * longest
        self._in_flight = InFlightRequests(_SHARE_BATCHES)
        self._links: dict[str, ServerLink] = {}
        self._left_out: dict[str, str] = {}
        self._waiting_since_s = 0.0
        self._num_read = 0
        self._open = ExitStack()

    def answers(self, requests: Iterable[PoolRequest]) -> Iterator[PoolAnswer]:
        """Yield each request's answer, in order; DeviceError if no device can be used.

        `requests` are taken as far ahead as batches look, beyond those in flight.
        """
        numbered = self._numbered(requests)
        num_taken = 0
        with self._pool.in_use(), self._open:
            for batch in form_batches(numbered, self._pool.batch_frames, self._look_ahead_frames):
                # The next answer may be one of this batch, whose first request is the oldest.
                while num_taken < batch.numbers[0]:
                    held = self._in_flight.num_frames
                    if held == 0 or held + batch.num_frames <= self._in_flight_frames:
                        break
                    yield self._next(num_taken)
                    num_taken += 1
                self._in_flight.add(batch)
                self._offer()
                self._open_device()
                while (answer := self._in_flight.take(num_taken)) is not None:
                    yield answer
                    num_taken += 1
            for number in range(num_taken, self._num_read):
                yield self._next(number)

    def _numbered(self, requests: Iterable[PoolRequest]) -> Iterator[tuple[int, PoolRequest]]:
        for number, request in enumerate(requests):
            self._num_read = number + 1
            num_bytes = len(request.payload)
            if num_bytes > MAX_MESSAGE_BYTES:
                need = f"need at most {MAX_MESSAGE_BYTES}"
                self._in_flight.refuse(number, f"request of {num_bytes} bytes: {need}")
            else:
                yield number, request

    def _offer(self) -> None:
        for link in list(self._links.values()):
            link.offer()

    def _next(self, number: int) -> PoolAnswer:
        while (answer := self._in_flight.take(number, _POLL_INTERVAL_S)) is None:
            self._open_device()
        return answer

    def _open_device(self) -> None:
        """Open one more device if batches wait that those open do not ask for."""
        usable = [
            each for each in self._devices if each not in self._links and each not in self._left_out
        ]
        if not usable and len(self._left_out) == len(self._devices):
            reasons = "; ".join(f"{device}: {reason}" for device, reason in self._left_out.items())
            none = f"{self._pool.factory}: no device of this host can be used"
            raise DeviceError(f"{none}: {reasons}")
        if not usable or not self._need_another():
            return
        self._waiting_since_s = time.monotonic()
        device = self._open.enter_context(self._pool.least_busy(usable))
        link = ServerLink(self._pool, device, self._in_flight, self._offer)
        self._links[device] = link
        name = f"device {link.device}"
        thread = threading.Thread(target=self._run, args=(link,), name=name, daemon=True)
        self._open.callback(thread.join, _CLOSE_LIMIT_S)
        self._open.callback(link.close)  # before the thread is waited for
        thread.start()

    def _need_another(self) -> bool:
        num_frames = self._in_flight.num_waiting_frames
        if not self._links or not self._in_flight.num_waiting:
            self._waiting_since_s = time.monotonic()
            return self._in_flight.num_waiting > 0
        times_s = [link.connected_at_s for link in list(self._links.values())]
        connected_s = [each for each in times_s if each is not None]
        # Of servers that are about to start, each will take a batch.
        expected = len(times_s) - len(connected_s)
        since_s = max([self._waiting_since_s, *connected_s])
        has_waited = time.monotonic() > since_s + _OPEN_AFTER_S
        return has_waited and num_frames >= expected * self._pool.batch_frames

    def _run(self, link: ServerLink) -> None:
        try:
            reason = link.run()
        except Exception as error:
            # Without a thread its requests would be waited for without end.
            reason = f"{type(error).__name__}: {error}"
        if reason:
            self._in_flight.lose(link.device, reason)
            self._left_out[link.device] = reason
            FAULTS.add(link.device, "left out", reason)
            del self._links[link.device]
            print(f"{link.device} is left out: {reason}", file=sys.stderr, flush=True)
            self._offer()
