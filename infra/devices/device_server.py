"""Serve one device: make its function once, then compute the batches that clients send.

infra/devices/device_pool.py starts this program with a device, the path of its socket, and the pool
as JSON on standard input. Three threads keep the device busy: one prepares a batch, one computes,
one answers. Batches wait in a queue, first come, first served; while it has room, clients are asked
for more. Out of memory errors teach how many frames of a batch fit into the device's memory. The
time that earlier batches took tells when a device is stuck.
"""

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any, Generic, Protocol, TypeVar

from infra.devices.device_pool import ENDED, DevicePool, held, remove_abandoned
from infra.devices.messages import (
    MAX_MESSAGE_BYTES,
    Kind,
    Message,
    MessageError,
    PoolRequest,
    padded_frames,
    receive_message,
    send_message,
)
from infra.host_folder import locked
from infra.settings import read_record


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


_GOOD_BATCHES = 256
"""So many batches in succession let the budget grow by an eighth: a failed try takes seconds."""


@dataclass(slots=True)
class FrameBudget:
    """FrameBudget: fewer padded frames a batch than did not fit, and `max_frames` at most."""

    max_frames: int
    num_frames: int = 0
    _num_good: int = 0

    def __post_init__(self) -> None:
        self.num_frames = self.max_frames

    def shrink(self, num_frames: int) -> None:
        """Take less than a batch's padded frames, which did not fit, as the budget."""
        # Not half of them: then whether a batch is divided would depend on those before it.
        self.num_frames = max(1, min(self.num_frames, num_frames - 1))
        self._num_good = 0

    def grow(self) -> None:
        """Count a batch that fitted; many in succession raise the budget slowly."""
        self._num_good += 1
        if self._num_good >= _GOOD_BATCHES and self.num_frames < self.max_frames:
            self.num_frames = min(self.max_frames, self.num_frames + self.num_frames // 8 + 1)
            self._num_good = 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host had too little memory, by the names that torch uses.

    torch's class is found by its name, so that a server of another library needs no torch.
    """
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    texts = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


_LEAST_LIMIT_S = 20.0
_TIMES_THE_SLOWEST = 20.0


class BatchWatch:
    """BatchWatch times the oldest unfinished batch against the slowest one so far, by the frame.

    The first batch has `first_limit_s`, as nothing is known of the device yet. Batches overlap, so
    a batch's time begins when the one before it ends. Safe for threads.
    """

    def __init__(self, first_limit_s: float) -> None:
        self._first_limit_s = first_limit_s
        self._slowest_s = 0.0  # a frame
        self._begun: OrderedDict[int, int] = OrderedDict()
        self._oldest_since_s = 0.0
        self._changed = threading.Condition()

    def begin(self, batch: int, num_frames: int) -> None:
        """Note that the batch `batch` was taken."""
        with self._changed:
            if not self._begun:
                self._oldest_since_s = time.monotonic()
            self._begun[batch] = max(1, num_frames)

    def end(self, batch: int) -> None:
        """Note that a batch was answered, or failed."""
        with self._changed:
            now_s = time.monotonic()
            num_frames = self._begun.pop(batch)
            self._slowest_s = max(self._slowest_s, (now_s - self._oldest_since_s) / num_frames)
            self._oldest_since_s = now_s
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until no batch is in work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._begun)

    def overdue(self) -> str:
        """Return why the device counts as stuck, or an empty text."""
        with self._changed:
            if not self._begun:
                return ""
            num_frames = next(iter(self._begun.values()))
            limit_s = max(_LEAST_LIMIT_S, _TIMES_THE_SLOWEST * self._slowest_s * num_frames)
            if not self._slowest_s:
                limit_s = self._first_limit_s
            taken_s = time.monotonic() - self._oldest_since_s
        late = f"a batch of {num_frames} frames takes {taken_s:.0f} s: the limit is {limit_s:.0f} s"
        return late if taken_s > limit_s else ""


P = TypeVar("P")
C = TypeVar("C")
R = TypeVar("R")

_FLUSH_LIMIT_S = 0.01  # a client that does not read delays a batch no longer
_ISOLATED_FLUSH_LIMIT_S = 1.0
_SECOND_TRY_AFTER_S = 1.0  # another process's memory may be free by then
_TOO_LARGE = "out of memory: a batch of this many frames or fewer did not fit before"


class DeviceFunction(Protocol[P, C]):
    """DeviceFunction: what a server does with each batch of payloads, in three steps.

    An error of a step fails the batch. What `finish` returns as an error is of that payload alone.
    """

    def prepare(self, payloads: Sequence[bytes | memoryview]) -> P:
        """Decode the payloads and copy them to the device."""

    def compute(self, prepared: P) -> C:
        """Compute; a GPU may still be at it when this returns."""

    def finish(self, computed: C) -> Sequence[bytes | Exception]:
        """Wait for the device, and encode each payload's answer."""

    def check(self) -> None:
        """Free what memory can be freed, and raise unless the device computes something small."""


class ComputePipeline(Generic[P, C]):
    """ComputePipeline applies a device's function to the batches of a queue, in three threads.

    A batch is decoded and copied while the one before it computes, and answered while the next one
    does. It is computed as it came, since batched with other requests its answers would differ in
    their last bits. If it fails it is tried once more, alone in the device; if it fails again, it
    is its client that divides it. Batches of as many frames as one that did not fit alone are not
    tried for a while.
    """

    def __init__(
        self,
        function: DeviceFunction[P, C],
        requests: RequestQueue,
        budget: FrameBudget,
        watch: BatchWatch,
        delivery: "DeviceServer",
        give_up: Callable[[str], None],
    ) -> None:
        self._function = function
        self._requests = requests
        self._budget = budget
        self._watch = watch
        self._delivery = delivery
        self._give_up = give_up
        # A batch each between the steps, so that no step waits for its next one.
        self._prepared: Queue[_Work[P]] = Queue(maxsize=1)
        self._computed: Queue[_Work[C]] = Queue(maxsize=1)
        self._numbers = count()

    def start(self) -> None:
        """Start the threads, which end with the process."""
        for step in (self._prepare_next, self._compute_next, self._finish_next):
            threading.Thread(target=_forever, args=(step,), name=step.__name__, daemon=True).start()

    # Each step's arrays end with its call: a batch is in a device's memory no longer than needed.
    def _prepare_next(self) -> None:
        batch, number = self._requests.take(), next(self._numbers)
        requests = batch.requests
        if len(requests) > 1 and padded_frames(requests) > self._budget.num_frames:
            self._delivery.failed(batch, _TOO_LARGE, out_of_memory=True)
            return
        if batch.is_isolated:
            # What ends the server with it must not look like its fault, nor the reverse.
            self._watch.wait_until_idle()
            self._delivery.flush(_ISOLATED_FLUSH_LIMIT_S)
        self._watch.begin(number, batch.num_frames)
        self._delivery.taken(batch)
        # Clients must know by then what may end the server at once.
        self._delivery.flush(_ISOLATED_FLUSH_LIMIT_S if batch.is_isolated else _FLUSH_LIMIT_S)
        with self._trying_twice(number, batch):
            prepared = self._function.prepare([each.payload for each in requests])
            self._prepared.put(_Work(number, batch, prepared))
            del prepared
        if batch.is_isolated:
            self._watch.wait_until_idle()

    def _compute_next(self) -> None:
        work = self._prepared.get()
        with self._trying_twice(work.number, work.batch):
            computed = self._function.compute(work.content)
            self._computed.put(_Work(work.number, work.batch, computed))

    def _finish_next(self) -> None:
        work = self._computed.get()
        with self._trying_twice(work.number, work.batch):
            answers = self._function.finish(work.content)
            count = len(work.batch.requests)
            if len(answers) != count:
                raise ValueError(f"{len(answers)} answers: need {count}, one a request")
            self._delivery.answered(work.batch, answers)
            self._budget.grow()
            self._watch.end(work.number)

    @contextmanager
    def _trying_twice(self, number: int, batch: QueuedBatch) -> Iterator[None]:
        """If a step fails, put the batch back to be alone, or if it was, tell its client.

        Gives the device up if it cannot compute anything small after a failure.
        """
        try:
            yield
            return
        except BaseException as error:
            traceback.print_exc()
            reason, out_of_memory = reason_of(error), is_out_of_memory(error)
        try:
            self._function.check()
        except BaseException as error:
            if not is_out_of_memory(error):
                self._give_up(f"{reason}; then {reason_of(error)}")
        if not batch.is_isolated:
            if out_of_memory:
                time.sleep(_SECOND_TRY_AFTER_S)
            self._requests.put_first(replace(batch, is_isolated=True))
        else:
            if out_of_memory:
                self._budget.shrink(padded_frames(batch.requests))
            self._delivery.failed(batch, reason, out_of_memory)
        self._watch.end(number)


@dataclass(frozen=True, slots=True, eq=False)
class _Work(Generic[R]):
    """_Work: a batch between two steps."""

    number: int
    batch: QueuedBatch
    content: R


def _forever(step: Callable[[], None]) -> None:
    while True:
        step()


def reason_of(error: BaseException) -> str:
    """Return an error's kind and text."""
    return f"{type(error).__name__}: {error}"


BEAT_INTERVAL_S = 1.0

_QUEUED_BATCHES = 2  # beside those in work
_PREDECESSOR_LIMIT_S = 600.0
_FLUSH_POLL_S = 0.0002


class DeviceServer:
    """DeviceServer computes for all clients of a Unix socket until it has had none for a while.

    It ends at once where its device no longer computes or takes too long, the first batch longer
    than a start, so that clients send what they were not answered elsewhere.
    """

    def __init__(self, pool: DevicePool, path: Path, function: DeviceFunction[Any, Any]) -> None:
        self._path, self._idle_timeout_s = path, pool.idle_timeout_s
        self._requests = RequestQueue()
        self._watch = BatchWatch(pool.start_timeout_s)
        self._outgoing: dict[int, Queue[Message]] = {}
        self._last_used_s = time.monotonic()
        self._admission = Admission(
            pool.batch_frames,
            _QUEUED_BATCHES * pool.batch_frames,
            waiting=lambda: self._requests.num_frames,
            ask=lambda client, frames: self._send(client, Message(Kind.WANT, num_frames=frames)),
        )
        budget = FrameBudget(pool.batch_frames)
        self._pipeline = ComputePipeline(
            function, self._requests, budget, self._watch, self, _end_process
        )

    def serve(self) -> None:
        """Serve clients; return when there was none for the pool's `idle_timeout_s`."""
        path = self._path
        path.unlink(missing_ok=True)  # left by a server that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(128)
            listener.settimeout(BEAT_INTERVAL_S)
            self._pipeline.start()
            threading.Thread(target=self._beat, daemon=True).start()
            for client in count():
                connection = self._accept(listener)
                if connection is None:
                    break
                outgoing = self._outgoing[client] = Queue()
                receive = partial(self._receive, client, connection)
                send_all = partial(self._send_all, client, connection, outgoing)
                for talk in (receive, send_all):
                    threading.Thread(target=talk, daemon=True).start()
            path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        while self._outgoing or time.monotonic() < self._last_used_s + self._idle_timeout_s:
            try:
                return listener.accept()[0]
            except TimeoutError:
                continue
        return None

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_INTERVAL_S)
            if reason := self._watch.overdue():
                _end_process(f"stuck: {reason}")
            for client in list(self._outgoing):
                self._send(client, Message(Kind.BEAT))

    def _receive(self, client: int, connection: socket.socket) -> None:
        requests: list[PoolRequest] = []
        try:
            while True:
                message = receive_message(connection)
                match message.kind:
                    case Kind.REQUEST:
                        requests.append(PoolRequest(message.num_frames, message.body))
                    case Kind.BATCH | Kind.ISOLATED_BATCH if requests:
                        is_isolated = message.kind is Kind.ISOLATED_BATCH
                        batch = QueuedBatch(client, message.number, requests, is_isolated)
                        self._requests.put(batch)
                        requests = []
                    case Kind.SENT:
                        self._admission.sent(client, has_more=message.num_frames > 0)
                    case Kind.READY:
                        self._admission.ready(client)
                    case other:
                        raise MessageError(f"message of kind {other}: need one of a client")
        except (EOFError, OSError):
            pass  # the client has ended
        except MessageError:
            traceback.print_exc()
        finally:
            self._leave(client, connection)

    def _leave(self, client: int, connection: socket.socket) -> None:
        self._last_used_s = time.monotonic()
        self._outgoing.pop(client).put(Message(Kind.BEAT))  # wakes its other thread
        connection.close()
        self._requests.drop(client)
        self._admission.gone(client)

    def _send_all(self, client: int, connection: socket.socket, outgoing: "Queue[Message]") -> None:
        with suppress(OSError):  # the client has ended: the other thread forgets it
            while client in self._outgoing:
                send_message(connection, outgoing.get())
                outgoing.task_done()

    def _send(self, client: int, message: Message) -> None:
        outgoing = self._outgoing.get(client)
        if outgoing is not None:
            outgoing.put(message)

    def taken(self, batch: QueuedBatch) -> None:
        """Tell the client that its batch is computed, and ask for more."""
        self._send(batch.client, Message(Kind.TAKEN, batch.number))
        self._admission.fill()

    def answered(self, batch: QueuedBatch, answers: Sequence[bytes | Exception]) -> None:
        """Send a batch's answers."""
        for answer in answers:
            if isinstance(answer, Exception):
                message = Message(Kind.FAILURE, batch.number, body=reason_of(answer).encode())
            elif len(answer) > MAX_MESSAGE_BYTES:
                too_long = f"answer of {len(answer)} bytes: need at most {MAX_MESSAGE_BYTES}"
                message = Message(Kind.FAILURE, batch.number, body=too_long.encode())
            else:
                message = Message(Kind.ANSWER, batch.number, body=answer)
            self._send(batch.client, message)

    def failed(self, batch: QueuedBatch, reason: str, out_of_memory: bool) -> None:
        """Send why a batch cannot be computed as it is, and ask for more."""
        kind = Kind.OUT_OF_MEMORY if out_of_memory else Kind.BATCH_FAILED
        self._send(batch.client, Message(kind, batch.number, body=reason.encode()))
        self._admission.fill()

    def flush(self, limit_s: float) -> None:
        """Wait until clients have all messages, at most so long."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and any(
            outgoing.unfinished_tasks for outgoing in list(self._outgoing.values())
        ):
            time.sleep(_FLUSH_POLL_S)


def _end_process(reason: str) -> None:
    # A GPU context that failed once may fail for every later batch.
    print(ENDED + reason, file=sys.stderr, flush=True)
    os._exit(1)


def _main() -> None:
    device, path = sys.argv[1], Path(sys.argv[2])
    pool = read_record(DevicePool, json.load(sys.stdin), "settings")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = path.parents[1]  # of all that belongs to the pool
    try:
        with held(folder):
            _serve(pool, device, path)
    finally:
        remove_abandoned(folder.parent)


def _serve(pool: DevicePool, device: str, path: Path) -> None:
    # One server per device: wait for a predecessor that is about to end.
    with locked(Path(f"{path}.server"), _PREDECESSOR_LIMIT_S):
        module, _, name = pool.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        function = factory(device, **pool.arguments)
        # A device that cannot compute is found out before it costs an utterance.
        function.check()
        DeviceServer(pool, path, function).serve()


if __name__ == "__main__":
    _main()
