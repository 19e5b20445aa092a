"""A task's conversation with one device's server, which is started again when it is lost."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from infra.device_faults import FAULTS, FaultKind
from infra.devices.device_pool import DeviceError, DevicePool, ServerLostError, kill_server
from infra.devices.in_flight_requests import InFlightRequests, PoolAnswer, RequestFailure
from infra.devices.messages import Kind, Message, MessageError, receive_message, send_message

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
