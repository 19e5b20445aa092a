"""Find the samples of a WAV; refuse one that is cut, joined or was sent as text.

Whole files and segments of recordings go through the same functions, so that both are refused
alike. They ask for bytes by `Read`, as an object of many hours is not fetched to judge it. Fields
that RIFF states about itself are not trusted: recorders in browsers count differently, or leave 0.

Live speech is read as it arrives: raw 16-bit PCM, or a WAV that does not know its end.
"""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import numpy as np
from jaxtyping import Float32

from pipeline.audio.audio_file import (
    BLOCK_SAMPLES,
    AudioFile,
    Block,
    Codec,
    Read,
    duration_by_libsndfile,
    open_by_libsndfile,
    other_form,
    reader_of,
)
from pipeline.audio.conversion import require_accepted
from pipeline.audio.errors import AudioError
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.settings import AudioConversion

_MAGICS = (b"RIFF", b"RF64", b"BW64")
_OTHER_FILES = (*_MAGICS, b"fLaC", b"OggS")
_NO_CHUNKS_BEHIND = (*_OTHER_FILES, b"data")
_UNPADDED = {b"fmt ", b"data", b"fact", b"LIST", *_OTHER_FILES}
_MAX_CHUNKS = 1_000
_MAX_FORMAT_BYTES = 2**16
_MAX_CHANNELS = 1024  # of libsndfile
_EXTENSIBLE = 0xFFFE
_PLAIN_TAGS = {1: "PCM", 3: "float", 6: "A-law", 7: "mu-law"}
_LAW_TAGS = {6, 7}

_OPEN_LENGTHS = (2**31, 2**32, 2**63, 2**64)
_OPEN_BELOW = 4096  # SoX states 2^31 - 4096, others subtract the header

_MANY_NEWLINES = 8  # fewer may be pairs by chance
_SEARCHED_BYTES = 2**24
_BLOCK_BYTES = 2**15  # the first block is within the 64 KB that are read of every recording


def is_open_length(num_bytes: int) -> bool:
    """Return whether writers to a pipe state this length: 0, or 2 or 4 GB less a header or so."""
    return num_bytes == 0 or any(0 <= most - num_bytes <= _OPEN_BELOW for most in _OPEN_LENGTHS)


@dataclass(frozen=True, slots=True)
class WavLayout:
    """WavLayout holds a WAV's format chunk, and where its samples lie among the object's bytes.

    `frame_bytes` are those of one sample of every channel; 0 where samples have none of their own,
    as of ADPCM. `end` is stated, and may be beyond the object, or the object's where it is open.
    """

    format_chunk: bytes
    num_channels: int
    rate_hz: int
    frame_bytes: int
    start: int
    end: int
    object_bytes: int
    is_open: bool

    @property
    def num_samples(self) -> int:
        """The samples of each channel that are there, where they have bytes of their own."""
        return (min(self.end, self.object_bytes) - self.start) // self.frame_bytes

    @property
    def is_pcm_16(self) -> bool:
        """Whether samples are 16-bit integers, by a format that is not extensible."""
        return self.format_chunk[:2] == b"\x01\0" and self.format_chunk[14:16] == b"\x10\0"

    def require_whole(self, read: Read) -> None:
        """Raise AudioError unless the object is one WAV, and has all samples that it states."""
        surplus = self.object_bytes - self.end
        behind = _behind_chunks(read, self.start, self.end - self.start, self.object_bytes)
        name = read(behind, 4)
        if name in _OTHER_FILES:
            raise AudioError("joined_files", f"another file begins at byte {behind}")
        if name == b"data":
            raise AudioError("not_audio", f"a WAV with other samples at byte {behind}")
        if self.is_open or behind < self.object_bytes or surplus < 0:
            _require_binary(read, self.start, self.object_bytes, surplus)
        if surplus < 0:
            raise AudioError("truncated", f"{-surplus} bytes fewer than the header says")
        if self.frame_bytes and (rest := (self.end - self.start) % self.frame_bytes):
            detail = f"{self.num_samples} samples, and {rest} bytes of another"
            raise AudioError("truncated", detail)


def is_wav(head: bytes) -> bool:
    """Return whether bytes begin as a WAV, or as an RF64, whose sizes have 64 bits."""
    return head.startswith(_MAGICS) and head[8:12] == b"WAVE"


def wav_layout(read: Read, object_bytes: int) -> WavLayout:
    """Read the header of what `is_wav`; AudioError if it has no format or no samples."""
    form, long_size, position = b"", 0, 12  # after "RIFF", its size and "WAVE"
    for _ in range(_MAX_CHUNKS):
        name, size = _chunk_at(read, position)
        start = position + 8
        if name == b"data":
            break
        if name == b"fmt " and not form:
            form = read(start, min(size, _MAX_FORMAT_BYTES))
        if name == b"ds64":
            long_size = int.from_bytes(read(start + 8, 8), "little")
        position = _next_chunk(read, start, size)
    else:
        raise AudioError("not_audio", f"a WAV without samples in its first {_MAX_CHUNKS} chunks")
    if size == 2**32 - 1 and long_size:
        size = long_size
    num_behind = object_bytes - start
    is_open = is_open_length(size) and size != num_behind
    if size == 0:
        is_open = num_behind > 0 and _behind_chunks(read, start, 0, object_bytes) == start
    num_channels, rate_hz, frame_bytes = _format(form)
    end = object_bytes if is_open else start + size
    place = start, end, object_bytes, is_open
    return WavLayout(form, num_channels, rate_hz, frame_bytes, *place)


def wav_file(format_chunk: bytes, samples: bytes) -> bytes:
    """Write a WAV of a format chunk and samples."""
    form = format_chunk + b"\0" * (len(format_chunk) % 2)
    pad = b"\0" * (len(samples) % 2)
    num_bytes = 20 + len(form) + len(samples) + len(pad)
    head = struct.pack("<4sI4s4sI", b"RIFF", num_bytes, b"WAVE", b"fmt ", len(format_chunk))
    return b"".join((head, form, struct.pack("<4sI", b"data", len(samples)), samples, pad))


def _format(form: bytes) -> tuple[int, int, int]:
    """Read the channels, the rate and the bytes of a sample of all channels, 0 of other codecs."""
    if len(form) < 16:
        raise AudioError("not_audio", f"a WAV format of {len(form)} bytes: need 16 or more")
    tag, num_channels, rate_hz, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if not (1 <= num_channels <= _MAX_CHANNELS and 1 <= rate_hz < 2**31):
        raise AudioError("not_audio", f"a WAV of {num_channels} channels, {rate_hz} Hz")
    if tag == _EXTENSIBLE:
        tag = int.from_bytes(form[24:26], "little")
    if tag not in _PLAIN_TAGS:
        return num_channels, rate_hz, 0
    if not 1 <= bits <= 64 or (tag in _LAW_TAGS and bits != 8):
        need = "8" if tag in _LAW_TAGS else "1 to 64"
        raise AudioError("not_audio", f"{_PLAIN_TAGS[tag]} of {bits} bits: need {need}")
    # Some writers state other bytes a sample than its bits need: decoders go by the bits.
    return num_channels, rate_hz, num_channels * ((bits + 7) // 8)


def _chunk_at(read: Read, position: int) -> tuple[bytes, int]:
    header = read(position, 8)
    if len(header) < 8 or not _is_name(header[:4]):
        raise AudioError("not_audio", f"a WAV without samples: no chunk at byte {position}")
    return header[:4], int.from_bytes(header[4:], "little")


def _is_name(name: bytes) -> bool:
    return len(name) == 4 and all(0x20 <= byte < 0x7F for byte in name)


def _next_chunk(read: Read, start: int, num_bytes: int) -> int:
    """Return where the next chunk begins; some writers leave out the pad byte of an odd one."""
    end = start + num_bytes
    return end + (num_bytes % 2 and read(end, 4) not in _UNPADDED)


def _behind_chunks(read: Read, start: int, num_bytes: int, object_bytes: int) -> int:
    """Return where the chunks that follow end: at the object's end, if they fill it."""
    position = _next_chunk(read, start, num_bytes)
    for _ in range(_MAX_CHUNKS):
        header = read(position, 8)
        if len(header) < 8 or not _is_name(header[:4]) or header.startswith(_NO_CHUNKS_BEHIND):
            break
        following = _next_chunk(read, position + 8, int.from_bytes(header[4:], "little"))
        if following > object_bytes + 1:  # the last pad byte may be missing
            break
        position = following
    return min(position, object_bytes)


def _require_binary(read: Read, start: int, object_bytes: int, surplus: int) -> None:
    """Raise AudioError if line feeds or carriage returns became pairs, as in a transfer as text.

    Each shifts all later samples by a byte. The search ends as soon as both are found alone:
    in speech, within a few hundred bytes.
    """
    pairs, feeds, returns, carried, end = 0, 0, 0, b"", start
    last = min(object_bytes, start + _SEARCHED_BYTES)
    while end < last and pairs < _MANY_NEWLINES:
        block = carried + read(end, _BLOCK_BYTES)
        carried = b"\r" if block.endswith(b"\r") else b""  # its line feed may be in the next block
        block = block[: len(block) - len(carried)]
        pairs += block.count(b"\r\n")
        feeds += block.count(b"\n")
        returns += block.count(b"\r")
        if pairs < min(feeds, returns):
            return
        end += _BLOCK_BYTES
    is_counted = end >= object_bytes and 0 < pairs == surplus
    if pairs >= _MANY_NEWLINES or is_counted:
        alike = "line feeds follows a carriage return"
        if pairs < feeds:
            alike = "carriage returns comes before a line feed"
        detail = f"each of {pairs} {alike}: transfer the file again, as binary"
        raise AudioError("newlines_converted", detail)


def open_wav(content: bytes, conversion: AudioConversion) -> AudioFile:
    """Open a whole WAV."""
    read = reader_of(content)
    layout = wav_layout(read, len(content))
    require_accepted(conversion, layout.rate_hz, layout.num_channels)
    layout.require_whole(read)
    if layout.is_pcm_16:
        stated = layout.rate_hz, layout.num_channels, layout.num_samples
        return AudioFile(*stated, partial(_pcm_blocks, content, layout))
    if not layout.frame_bytes:
        return open_by_libsndfile(content, conversion)
    # As a segment is read, so that nothing but format and samples can make a difference.
    alone = wav_file(layout.format_chunk, content[layout.start : layout.end])
    file = open_by_libsndfile(alone, conversion)
    if file.num_samples != layout.num_samples:
        detail = f"{file.num_samples} samples in the bytes of {layout.num_samples}"
        raise AudioError("not_audio", f"a WAV whose format contradicts itself: {detail}")
    return file


def _pcm_blocks(content: bytes, layout: WavLayout) -> Iterator[Block]:
    # The samples that libsndfile gives, in a fifth of its time.
    for first in range(0, layout.num_samples, BLOCK_SAMPLES):
        num_samples = min(BLOCK_SAMPLES, layout.num_samples - first)
        start = layout.start + first * layout.frame_bytes
        block = memoryview(content)[start : start + num_samples * layout.frame_bytes]
        yield samples_of(block).reshape(num_samples, layout.num_channels)


def wav_duration_s(read: Read, num_bytes: int) -> float | None:
    """Compute how long a WAV lasts by its header and its size."""
    layout = wav_layout(read, num_bytes)
    if not layout.frame_bytes:
        return duration_by_libsndfile(read, num_bytes)
    return layout.num_samples / layout.rate_hz


WAV = Codec("WAV", is_wav, open_wav, wav_duration_s)


SAMPLE_BYTES = 2
_PCM = 1
_MAX_CHUNK_BYTES = 1 << 24
_FILES = (b"fLaC", b"OggS", b"ID3\x02", b"ID3\x03", b"ID3\x04", b"RF64", b"BW64")
"""What streams begin with that are files of forms that are read; as PCM they would be noise."""

_NEED = "need 16 kHz, 1 channel, 16 bits: arecord -f S16_LE -r 16000 -c 1, or sox's -r 16000 -c 1"


def pcm_pieces(
    file: BinaryIO | io.IOBase, piece_samples: int
) -> Iterator[Float32[np.ndarray, " samples"]]:
    """Yield pieces of `piece_samples` samples in [-1, 1] as they arrive; the last may be shorter.

    A stream that begins with RIFF is a WAV, any other signed 16-bit little-endian PCM. AudioError
    for a WAV of another form, and for another file.
    """
    head = file.read(4)
    is_riff = head == b"RIFF"
    head += b"" if is_riff else file.read(4)
    if head.startswith(_FILES):
        said = f"a stream that begins with {head[:4]!r}: give the file's name"
        raise AudioError("not_audio", said)
    if name := other_form(head):
        said = f"a stream that begins with {head!r}, as {name} file: convert it"
        raise AudioError("not_audio", said)
    left, begun = (_bytes_of_wav(file), b"") if is_riff else (None, head)
    while True:
        wanted = piece_samples * SAMPLE_BYTES - len(begun)
        data = begun + file.read(wanted if left is None else min(wanted, left))
        left = None if left is None else left - len(data)
        begun = b""
        if len(data) < SAMPLE_BYTES:
            return
        # Half a sample at the end of a stream that was cut is left out.
        yield samples_of(data[: len(data) // SAMPLE_BYTES * SAMPLE_BYTES])


def samples_of(data: bytes | memoryview) -> Float32[np.ndarray, " samples"]:
    """Convert signed 16-bit little-endian samples to [-1, 1], as files are decoded."""
    integers = np.frombuffer(data, "<i2")
    samples: Float32[np.ndarray, " samples"] = np.multiply(
        integers, np.float32(1 / 2**15), dtype=np.float32
    )
    return samples


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
