"""Detect damaged and joined WAV and OGG files, of which libsndfile decodes a part silently."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.audio.errors import AudioError
from pipeline.filterbank import SAMPLE_RATE_HZ

# What writers to a pipe state: ffmpeg and Kaldi, some, and SoX.
_OPEN_LENGTHS = {0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x7FFFF024}
_EXTENSIBLE = 0xFFFE
_PLAIN_TAGS = {1: "PCM", 3: "float", 6: "A-law", 7: "mu-law"}
_LAW_TAGS = {6, 7}
_SIGNATURES = (b"RIFF", b"fLaC", b"OggS")
_MANY_NEWLINES = 8
_OGG_HEADER = struct.Struct("<4sBBqIIIB")
_FIRST_OF_STREAM, _END_OF_STREAM = 2, 4
_OPUS_GRANULES_HZ = 48_000  # Opus counts so, whatever the rate
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def require_one_wav(data: bytes) -> None:
    """Raise AudioError for bytes with another file behind the WAV, or transferred as text."""
    end = _stated_end(data, 4)
    if len(data) == end:
        return
    if end and data.startswith(_SIGNATURES, end):
        raise AudioError("joined_files", f"another file begins at byte {end}")
    # CR LF for LF, as a transfer as text makes it, moves all samples behind it by one byte.
    newlines = data.count(b"\n")
    is_plausible = newlines >= _MANY_NEWLINES or (end and newlines == len(data) - end)
    if is_plausible and newlines and data.count(b"\r\n") == newlines:
        detail = f"each of {newlines} line feeds follows a carriage return"
        raise AudioError("newlines_converted", f"{detail}: transfer the file again, as binary")


def require_whole_wav(data: bytes, num_samples: int) -> None:
    """Raise AudioError unless a decoder's `num_samples` of each channel are all that a WAV holds.

    Refused are files that are cut, and those whose format contradicts itself.
    """
    if shortfall := riff_shortfall(data):
        raise AudioError("truncated", f"{shortfall} bytes fewer than the header says")
    start = _chunk_start(data, b"fmt ")
    tag, _, _, _, width, bits = struct.unpack("<HHIIHH", data[start : start + 16])
    if tag == _EXTENSIBLE:
        tag = int.from_bytes(data[start + 24 : start + 26], "little")
    if tag not in _PLAIN_TAGS:
        return
    if tag in _LAW_TAGS and (bits, width) != (8, 1):
        detail = f"format tag {tag}, {_PLAIN_TAGS[tag]}, of {bits} bits in {width} bytes: need 8"
        raise AudioError("not_audio", f"{detail} bits in 1 byte")
    expected, rest = divmod(_data_bytes(data), max(width, (bits + 7) // 8, 1))
    if num_samples < expected or rest:
        detail = f"{num_samples} samples of {expected}, and {rest} bytes of another"
        raise AudioError("truncated", detail)


def riff_shortfall(data: bytes) -> int:
    """Count the bytes that a WAV's header or its data chunk promises beyond the end.

    0 if nothing is missing, or the length is left open. A missing pad byte is common and harmless.
    """
    size_position = _chunk_start(data, b"data") - 4
    riff_missing = _stated_end(data, 4) - len(data)
    data_missing = _stated_end(data, size_position) - len(data)
    return max(data_missing, riff_missing if riff_missing > 1 else 0, 0)


def _stated_end(data: bytes, position: int) -> int:
    num_bytes = int.from_bytes(data[position : position + 4], "little")
    return 0 if num_bytes in _OPEN_LENGTHS else position + 4 + num_bytes


def _chunk_start(data: bytes, name: bytes) -> int:
    """Return the position of a chunk's content; beyond the end if there is none."""
    position = 12  # after "RIFF", its size and "WAVE"
    while position < len(data) and data[position : position + 4] != name:
        num_bytes = int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8 + num_bytes + num_bytes % 2
    return position + 8


def _data_bytes(data: bytes) -> int:
    start = _chunk_start(data, b"data")
    return (_stated_end(data, start - 4) or len(data)) - start


@dataclass(frozen=True, slots=True)
class _Page:
    """_Page holds the statements of an Ogg page's header (RFC 3533, 6)."""

    position: int
    end: int
    flags: int
    granule: int
    serial: int
    number: int


def ogg_num_samples(data: bytes, rate_hz: int = SAMPLE_RATE_HZ) -> int:
    """Count samples by the last page's granule position; AudioError unless all pages are whole.

    They must be of one file, follow one another without a gap, and the last must end it. For Opus,
    its pre-skip is subtracted.
    """
    pages = list(_pages(data))
    last = pages[-1]
    for number, page in enumerate(pages):
        is_another = page.serial != last.serial or (number and page.flags & _FIRST_OF_STREAM)
        if is_another:
            raise AudioError("joined_files", f"another file begins at byte {page.position}")
        if page.number != pages[0].number + number:
            raise AudioError("truncated", f"page {number} is missing at byte {page.position}")
    if not last.flags & _END_OF_STREAM:
        raise AudioError("truncated", f"no page ends the stream; they stop at byte {last.end}")
    if last.granule < 0:
        raise AudioError("truncated", "the page that ends the stream does not state its position")
    head = data.find(b"OpusHead", 0, 64)
    if head < 0:
        return last.granule
    pre_skip = int.from_bytes(data[head + 10 : head + 12], "little")
    return (last.granule - pre_skip) * rate_hz // _OPUS_GRANULES_HZ


def _pages(data: bytes) -> Iterator[_Page]:
    position = 0
    while data.startswith(b"OggS", position):
        if position + _OGG_HEADER.size > len(data):
            raise AudioError("truncated", f"page at byte {position} has half a header")
        header = _OGG_HEADER.unpack_from(data, position)
        _, _, flags, granule, serial, number, checksum, num_segments = header
        start = position + _OGG_HEADER.size
        end = start + num_segments + sum(data[start : start + num_segments])
        if end > len(data):
            raise AudioError(
                "truncated", f"page at byte {position} needs {end - len(data)} more bytes"
            )
        if _ogg_checksum(data[position : position + 22], data[position + 26 : end]) != checksum:
            raise AudioError("truncated", f"page at byte {position} has another checksum")
        yield _Page(position, end, flags, granule, serial, number)
        position = end
    if (lost := data.find(b"OggS", position)) >= 0:
        raise AudioError("truncated", f"no page between bytes {position} and {lost}")


def _ogg_checksum(before: bytes, after: bytes) -> int:
    """Compute the CRC-32 that Ogg sends with the highest bit first, unlike zlib's."""
    reversed_page = (before + bytes(4) + after).translate(_REVERSED_BITS)
    reversed_sum = zlib.crc32(reversed_page, 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{reversed_sum:032b}"[::-1], 2)
