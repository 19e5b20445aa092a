"""Batches of requests, and the messages that carry them between tasks and device servers.

Batches are of requests of like length, formed by the requests alone, whatever else is in flight.
A host's tasks and its device servers talk over Unix sockets.

A server asks a client for so many frames (WANT). The client sends batches of about as many: each
request of a batch (REQUEST), then that it is whole (BATCH, or ISOLATED_BATCH for one that may end
the server). It ends by whether more wait (SENT). The server names a batch that it begins to compute
(TAKEN), and answers its requests in their order (ANSWER, FAILURE). Or it says why it cannot compute
the batch as it is: it had too little memory (OUT_OF_MEMORY), or failed otherwise (BATCH_FAILED).
A client whose queue is no longer empty says so (READY). A server that lives says so every second
(BEAT).
"""

import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

_MAX_PADDED = 1.25
"""The frames with padding, for each without: a core computes padding like speech."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolRequest:
    """PoolRequest: what to compute, and its length in frames, by which batches are formed."""

    num_frames: int
    payload: bytes | memoryview


def padded_frames(requests: Sequence[PoolRequest]) -> int:
    """Return the frames of a batch whose requests are padded to the longest."""
    return len(requests) * max(each.num_frames for each in requests)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Batch: requests that are computed together, and their numbers in their task's stream.

    `num_lost` servers ended while they computed it.
    """

    numbers: Sequence[int]
    requests: Sequence[PoolRequest]
    num_lost: int = 0

    @property
    def num_frames(self) -> int:
        """Return the frames without padding."""
        return sum(each.num_frames for each in self.requests)

    def part(self, start: int, stop: int) -> "Batch":
        """Return the batch of some of the requests."""
        return replace(self, numbers=self.numbers[start:stop], requests=self.requests[start:stop])

    def halves(self) -> "list[Batch]":
        """Divide the batch by its order."""
        middle = len(self.requests) // 2
        return [self.part(0, middle), self.part(middle, len(self.requests))]

    def singles(self) -> "list[Batch]":
        """Divide the batch into its requests."""
        return [self.part(place, place + 1) for place in range(len(self.requests))]


def form_batches(
    requests: Iterable[tuple[int, PoolRequest]], max_frames: int, look_ahead_frames: int
) -> Iterator[Batch]:
    """Form batches of numbered requests: at most `max_frames` padded frames, or one request.

    Each has the oldest request that is in none yet, and those nearest to it in length among the
    next `look_ahead_frames` of the stream. So equal streams give equal batches, whenever requests
    arrive and whatever the devices do.
    """
    waiting: list[_Waiting] = []
    end = 0
    for number, request in requests:
        num_frames = max(1, request.num_frames)  # empty requests, too, fill the look-ahead
        while waiting and end + num_frames > waiting[0].start + look_ahead_frames:
            yield _take_batch(waiting, max_frames)
        waiting.append(_Waiting(end, number, request))
        end += num_frames
    while waiting:
        yield _take_batch(waiting, max_frames)


class _Waiting(NamedTuple):
    """_Waiting: a request that is in no batch yet, and the frames of the stream before it."""

    start: int
    number: int
    request: PoolRequest


def _take_batch(waiting: list[_Waiting], max_frames: int) -> Batch:
    places = choose_batch([each.request.num_frames for each in waiting], max_frames)
    chosen = [waiting[place] for place in places]
    for place in sorted(places, reverse=True):
        del waiting[place]
    return Batch([each.number for each in chosen], [each.request for each in chosen])


def choose_batch(lengths: Sequence[int], max_frames: int) -> list[int]:
    """Return the places of the first length and those nearest to it, the first among equals.

    Padded to the longest they have at most `max_frames`, unless the first has more, and at most a
    fifth of that is padding.
    """
    first = longest = num_frames = lengths[0]
    chosen = [0]
    for place in sorted(range(1, len(lengths)), key=lambda other: abs(lengths[other] - first)):
        length = lengths[place]
        padded = max(longest, length) * (len(chosen) + 1)
        if padded <= min(max_frames, _MAX_PADDED * (num_frames + length)):
            chosen.append(place)
            longest, num_frames = max(longest, length), num_frames + length
    return chosen


_HEADER = struct.Struct("<cQIQ")  # kind, number of the batch, frames, bytes of the body

_PIECE_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 32
"""The longest message; the frames of an utterance of 24 hours, the longest, have 2.2 GB."""

MAX_FRAMES = 2**32 - 1


class Kind(Enum):
    """Kind: the byte that a message begins with."""

    REQUEST = b"Q"
    BATCH = b"C"
    ISOLATED_BATCH = b"O"
    SENT = b"S"
    READY = b"R"
    WANT = b"W"
    TAKEN = b"T"
    ANSWER = b"A"
    FAILURE = b"F"
    OUT_OF_MEMORY = b"M"
    BATCH_FAILED = b"X"
    BEAT = b"B"


class MessageError(ValueError):
    """MessageError says that a message is longer than the bound, or of no known kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Message: a kind, the batch that it is about, a number of frames, and a body."""

    kind: Kind
    number: int = 0
    num_frames: int = 0
    body: bytes | memoryview = b""


def send_message(connection: socket.socket, message: Message) -> None:
    """Send a message whole; MessageError if it is too long."""
    length = len(message.body)
    _check_length(length)
    header = _HEADER.pack(message.kind.value, message.number, message.num_frames, length)
    if length < 1 << 16:
        connection.sendall(header + message.body)
        return
    connection.sendall(header)
    body = memoryview(message.body)
    # A socket's time limit is for a whole sendall, and a server reads 2 GB in more than that.
    for first in range(0, length, _PIECE_BYTES):
        connection.sendall(body[first : first + _PIECE_BYTES])


def receive_message(connection: socket.socket) -> Message:
    """Receive a message whole; raise EOFError if the connection closes too early.

    Raises MessageError, before it reserves memory, for a message that is too long.
    """
    header = _HEADER.unpack(_receive(connection, _HEADER.size))
    kind, number, num_frames, length = header
    _check_length(length)
    try:
        known = Kind(kind)
    except ValueError:
        need = ", ".join(each.value.decode() for each in Kind)
        raise MessageError(f"message of kind {kind!r}: need one of {need}") from None
    return Message(known, number, num_frames, _receive(connection, length))


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {num_bytes} bytes: need at most {MAX_MESSAGE_BYTES}")


def _receive(connection: socket.socket, num_bytes: int) -> memoryview:
    data = memoryview(bytearray(num_bytes))
    position = 0
    while position < num_bytes:
        received = connection.recv_into(data[position:])
        if received == 0:
            raise EOFError(f"connection closed after {position} of {num_bytes} bytes")
        position += received
    return data
