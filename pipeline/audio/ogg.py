"""Detect damaged and joined Ogg files, of which libsndfile decodes a part silently."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.audio.audio_file import (
    AudioFile,
    Codec,
    duration_by_libsndfile,
    open_by_libsndfile,
    require_decoded,
)
from pipeline.audio.errors import AudioError
from pipeline.settings import AudioConversion

_OGG_HEADER = struct.Struct("<4sBBqIIIB")
_MAX_PAGE_BYTES = 27 + 255 + 255 * 255
_CONTINUES = 255  # bytes of a packet's last segment, if the next page has the rest
_FLAGS_AT, _CHECKSUM_AT = 5, 22
_FIRST_OF_STREAM, _END_OF_STREAM = 2, 4
_OPUS_GRANULES_HZ = 48_000  # Opus counts so, whatever the rate
_OPUS_PADDING = 1_600  # the usual pre-skip of 80 ms, and a packet of 20 ms
_SHORTFALLS_PER_S = 8  # an eighth of a second, where a stream's first granule is not zero
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


@dataclass(frozen=True, slots=True)
class _Page:
    """_Page holds the statements of an Ogg page's header (RFC 3533, 6).

    `is_continued` where the next page has the rest of its last packet.
    """

    position: int
    end: int
    flags: int
    granule: int
    serial: int
    number: int
    is_continued: bool


def ended_ogg(data: bytes) -> bytes:
    """Mark the last page as the end of the stream, without which libsndfile may refuse an Opus.

    Other bytes are returned as they are: `ogg_num_samples` says what is wrong with them.
    """
    start = data.rfind(b"OggS", max(0, len(data) - _MAX_PAGE_BYTES))
    page = bytearray(data[max(0, start) :])
    if len(page) < _OGG_HEADER.size or page[_FLAGS_AT] & _END_OF_STREAM:
        return data
    if page_checksum(page) != int.from_bytes(page[_CHECKSUM_AT:][:4], "little"):
        return data
    page[_FLAGS_AT] |= _END_OF_STREAM
    page[_CHECKSUM_AT : _CHECKSUM_AT + 4] = page_checksum(page).to_bytes(4, "little")
    return data[:start] + page


def ogg_num_samples(data: bytes, rate_hz: int) -> int:
    """Count samples by the last page's granule position; AudioError unless all pages are whole.

    They must be of one file, follow one another without a gap, and end with a whole packet. A
    recorder that was stopped may not have marked the last page as the end. For Opus, its pre-skip
    is subtracted.
    """
    pages = list(_pages(data))
    last = pages[-1]
    for number, page in enumerate(pages):
        is_another = page.serial != last.serial or (number and page.flags & _FIRST_OF_STREAM)
        if is_another:
            raise AudioError("joined_files", f"another file begins at byte {page.position}")
        if page.number != pages[0].number + number:
            raise AudioError("truncated", f"page {number} is missing at byte {page.position}")
    if last.is_continued and not last.flags & _END_OF_STREAM:
        raise AudioError("truncated", f"no page ends the packet that stops at byte {last.end}")
    if last.granule < 0:
        raise AudioError("truncated", "the last page does not state its position")
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
        if page_checksum(data[position:end]) != checksum:
            raise AudioError("truncated", f"page at byte {position} has another checksum")
        is_continued = num_segments > 0 and data[start + num_segments - 1] == _CONTINUES
        yield _Page(position, end, flags, granule, serial, number, is_continued)
        position = end
    if (lost := data.find(b"OggS", position)) >= 0:
        raise AudioError("truncated", f"no page between bytes {position} and {lost}")


def page_checksum(page: bytes | bytearray) -> int:
    """Compute the CRC-32 of a page, whose highest bit comes first, unlike in zlib's."""
    blank = page[:_CHECKSUM_AT] + bytes(4) + page[_CHECKSUM_AT + 4 :]
    reversed_sum = zlib.crc32(blank.translate(_REVERSED_BITS), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{reversed_sum:032b}"[::-1], 2)


def open_ogg(content: bytes, conversion: AudioConversion) -> AudioFile:
    """Open a whole OGG of Vorbis or Opus."""
    is_opus = b"OpusHead" in content[:64]  # Vorbis states its end exactly
    file = open_by_libsndfile(ended_ogg(content), conversion)
    stated = ogg_num_samples(content, file.rate_hz)
    require_decoded(file.num_samples, stated - file.rate_hz // _SHORTFALLS_PER_S)
    return replace(file, padding_samples=_OPUS_PADDING if is_opus else 0)


OGG = Codec(
    "OGG",
    lambda head: head.startswith(b"OggS"),
    open_ogg,
    duration_by_libsndfile,
    lambda _: _OPUS_PADDING,
)
