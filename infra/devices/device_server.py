"""Serve one device: make its function once, then compute the batches that clients send.

infra/devices/device_pool.py starts this program with its settings as JSON on standard input.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Annotated, Any

from infra.devices.batches import PoolRequest
from infra.devices.compute_pipeline import (
    Admission,
    BatchWatch,
    ComputePipeline,
    DeviceFunction,
    FrameBudget,
    QueuedBatch,
    RequestQueue,
    reason_of,
)
from infra.devices.messages import (
    MAX_FRAMES,
    MAX_MESSAGE_BYTES,
    Kind,
    Message,
    MessageError,
    receive_message,
    send_message,
)
from infra.devices.pool_folder import held, locked, remove_abandoned
from infra.settings import Range, Text, check_ranges, read_record

BEAT_INTERVAL_S = 1.0

_QUEUED_BATCHES = 2  # beside those in work
_PREDECESSOR_LIMIT_S = 600.0
_FLUSH_POLL_S = 0.0002
_ENDED = "ended: "


@dataclass(frozen=True)
class ServerSettings:
    """ServerSettings names the function to serve ("module:function"), its device and socket.

    A batch has at most `batch_frames` padded frames, and the first one `first_batch_limit_s`.
    """

    factory: Annotated[str, Text(3, 1000, r"[\w.]+:\w+", "module:function")]
    arguments: dict[Annotated[str, Text(1, 1000)], Annotated[str, Text(0, 10_000)]]
    device: Annotated[str, Text(1, 100)]
    socket_path: Annotated[str, Text(1, 107)]
    batch_frames: Annotated[int, Range(1, MAX_FRAMES)]
    idle_timeout_s: Annotated[float, Range(1e-3, 1e9)]
    first_batch_limit_s: Annotated[float, Range(1e-3, 1e9)]

    __post_init__ = check_ranges

    @property
    def pool_folder(self) -> Path:
        """Return the folder of all that belongs to the pool."""
        return Path(self.socket_path).parents[1]


class DeviceServer:
    """DeviceServer computes for all clients of a Unix socket until it has had none for a while.

    It ends at once where its device no longer computes or takes too long, so that clients send
    what they were not answered elsewhere.
    """

    def __init__(self, settings: ServerSettings, function: DeviceFunction[Any, Any]) -> None:
        self._settings = settings
        self._requests = RequestQueue()
        self._watch = BatchWatch(settings.first_batch_limit_s)
        self._outgoing: dict[int, Queue[Message]] = {}
        self._last_used_s = time.monotonic()
        self._admission = Admission(
            settings.batch_frames,
            _QUEUED_BATCHES * settings.batch_frames,
            waiting=lambda: self._requests.num_frames,
            ask=lambda client, frames: self._send(client, Message(Kind.WANT, num_frames=frames)),
        )
        budget = FrameBudget(settings.batch_frames)
        self._pipeline = ComputePipeline(
            function, self._requests, budget, self._watch, self, _end_process
        )

    def serve(self) -> None:
        """Serve clients; return when there was none for `idle_timeout_s`."""
        path = Path(self._settings.socket_path)
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
        while self._outgoing or time.monotonic() < self._idle_until_s():
            try:
                return listener.accept()[0]
            except TimeoutError:
                continue
        return None

    def _idle_until_s(self) -> float:
        return self._last_used_s + self._settings.idle_timeout_s

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
    print(_ENDED + reason, file=sys.stderr, flush=True)
    os._exit(1)


def last_words(log: Path) -> str:
    """Return why the last server of a log ended itself, or that it did not say."""
    # Without a log no server of ours listened there.
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.splitlines()
    said = [line.removeprefix(_ENDED) for line in lines[-1:] if line.startswith(_ENDED)]
    return said[0] if said else "it was killed, or crashed"


def _main() -> None:
    settings = read_record(ServerSettings, json.load(sys.stdin), "settings")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with held(settings.pool_folder):
            _serve(settings)
    finally:
        remove_abandoned(settings.pool_folder.parent)


def _serve(settings: ServerSettings) -> None:
    # One server per device: wait for a predecessor that is about to end.
    with locked(Path(f"{settings.socket_path}.server"), _PREDECESSOR_LIMIT_S):
        module, _, name = settings.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        function = factory(settings.device, **settings.arguments)
        # A device that cannot compute is found out before it costs an utterance.
        function.check()
        DeviceServer(settings, function).serve()


if __name__ == "__main__":
    _main()
