"""Samples of 16 kHz mono speech as it arrives: raw 16-bit PCM, or a WAV whose end is not known."""

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from jaxtyping import Float32

from pipeline.audio.errors import AudioError
from pipeline.audio.wav import is_open_length
from pipeline.filterbank import SAMPLE_RATE_HZ

SAMPLE_BYTES = 2
FULL_SCALE = np.float32(32768)
_PCM, _EXTENSIBLE = 1, 0xFFFE
_MAX_CHUNK_BYTES = 1 << 24
_NEED = "need 16 kHz, 1 channel, 16 bits: arecord -f S16_LE -r 16000 -c 1, or sox's -r 16000 -c 1"


def pcm_pieces(
    file: BinaryIO | io.IOBase, piece_samples: int
) -> Iterator[Float32[np.ndarray, " samples"]]:
    """Yield pieces of `piece_samples` samples in [-1, 1] as they arrive; the last may be shorter.

    A stream that begins with RIFF is a WAV, any other signed 16-bit little-endian PCM. AudioError
    for a WAV of another form.
    """
    head = file.read(4)
    left = _bytes_of_wav(file) if head == b"RIFF" else None
    begun = b"" if left is not None else head
    while True:
        wanted = piece_samples * SAMPLE_BYTES - len(begun)
        data = begun + file.read(wanted if left is None else min(wanted, left))
        left = None if left is None else left - len(data)
        begun = b""
        if len(data) < SAMPLE_BYTES:
            return
        # Half a sample at the end of a stream that was cut is left out.
        yield samples_of(data[: len(data) // SAMPLE_BYTES * SAMPLE_BYTES])


def samples_of(data: bytes) -> Float32[np.ndarray, " samples"]:
    """Convert signed 16-bit little-endian samples to [-1, 1], as files are decoded."""
    return np.frombuffer(data, "<i2").astype(np.float32) / FULL_SCALE


def _bytes_of_wav(file: BinaryIO | io.IOBase) -> int | None:
    """Read a WAV up to its samples; return their bytes, or None if it does not know them."""
    if file.read(8)[4:] != b"WAVE":
        raise AudioError("not_audio", "RIFF without WAVE: need a WAV file, or raw 16-bit PCM")
    has_form = False
    while len(head := file.read(8)) == 8:
        name, size = struct.unpack("<4sI", head)
        if name == b"data":
            if not has_form:
                raise AudioError("not_audio", "a WAV whose samples come before their format")
            return None if is_open_length(size) else size
        if size > _MAX_CHUNK_BYTES:
            break
        content = file.read(size + size % 2)
        if name == b"fmt ":
            _require_form(content)
            has_form = True
    raise AudioError("truncated", "a WAV without samples")


def _require_form(content: bytes) -> None:
    if len(content) < 16:
        raise AudioError("truncated", f"a WAV format of {len(content)} bytes: need 16 or more")
    kind, channels, rate_hz, _, _, bits = struct.unpack("<HHIIHH", content[:16])
    if rate_hz != SAMPLE_RATE_HZ:
        raise AudioError("wrong_sample_rate", f"{rate_hz} Hz: {_NEED}")
    if channels != 1:
        raise AudioError("not_mono", f"{channels} channels: {_NEED}")
    if kind not in (_PCM, _EXTENSIBLE) or bits != 8 * SAMPLE_BYTES:
        raise AudioError("not_audio", f"format {kind:#x} of {bits} bits: {_NEED}")
