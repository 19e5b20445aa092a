"""Messages between a host's tasks and its device servers, over Unix sockets.

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
from dataclasses import dataclass
from enum import Enum

_HEADER = struct.Struct("<cQIQ")  # kind, number of the batch, frames, bytes of the body

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
    connection.sendall(message.body)


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
