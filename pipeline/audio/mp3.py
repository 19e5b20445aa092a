"""Count an MP3's frames and state their number, without which decoders guess the length.

A frame is a header and its payload, and the next header follows at once (ISO 11172-3, 2.4.2.3).
An "Xing" or "Info" frame may state the number. libsndfile trusts it; without it, libsndfile takes
the first frame's bit rate for all, and decodes 58,104 of a variable one's 160,000 samples.
"""

import math
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeline.audio.audio_file import (
    AudioFile,
    Codec,
    Read,
    duration_by_libsndfile,
    open_by_libsndfile,
    read_whole,
    reader_of,
)
from pipeline.audio.errors import AudioError, AudioReason
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.settings import AudioConversion

_PADDING_FRAMES = 4
"""Encoder and decoder delay, the last frame's filling, and a frame without sound before all."""

_MPEG_1, _LAYER_I, _LAYER_III = 3, 3, 1  # as headers code them
_KBIT_PER_S = {
    (True, 3): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 1): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 3): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 1): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_COUNT_MARKS = (b"Xing", b"Info")
_COUNT_OFFSET = 8  # after mark and flags, of which the lowest bit says that there is a count
_TAGS_AT_END = (b"TAG", b"APETAGEX", b"LYRICSBEGIN")
_ID3_HEADER_BYTES = 10
_UNPROTECTED = 0x00010000  # no checksum before the side information
_BIT_RATE, _MIDDLE_BIT_RATE = 0x0000F000, 0x00008000  # room for the count at any rate


@dataclass(frozen=True, slots=True)
class Header:
    """Header holds the statements of a frame's header; all frames of a file have one `kind`.

    `side_end` is the number of bytes before its main data, where an "Info" frame has its mark.
    """

    kind: tuple[int, int, int, bool]
    num_bytes: int
    num_samples: int
    side_end: int


@lru_cache(maxsize=256)  # a file has a dozen: 0.6 us a frame instead of 4
def parse_header(word: int) -> Header | None:
    """Read a frame header's 32 bits; None if they are none, or of free bit rate."""
    version, layer, rate = word >> 19 & 3, word >> 17 & 3, word >> 10 & 3
    bit_rate, padding = word >> 12 & 15, word >> 9 & 1
    is_sync = word >> 21 == 0x7FF and version != 1 and layer != 0
    if not is_sync or bit_rate in {0, 15} or rate == 3:
        return None
    is_1 = version == _MPEG_1
    bits_per_s, rate_hz = 1000 * _KBIT_PER_S[is_1, layer][bit_rate - 1], _RATES_HZ[version][rate]
    num_samples = 576 if layer == _LAYER_III and not is_1 else 1152
    num_bytes = num_samples // 8 * bits_per_s // rate_hz + padding
    if layer == _LAYER_I:  # counts in slots of four bytes
        num_samples, num_bytes = 384, (12 * bits_per_s // rate_hz + padding) * 4
    is_mono = word >> 6 & 3 == 3
    side_bytes = (17 if is_mono else 32) if is_1 else (9 if is_mono else 17)
    side_end = 4 + side_bytes + (0 if word & _UNPROTECTED else 2)
    return Header((version, layer, rate, is_mono), num_bytes, num_samples, side_end)


def counted_mp3(data: bytes) -> tuple[bytes, int]:
    """Return the file with a correct count of its frames, and the samples of all that hold sound.

    AudioError for bytes that are no frame, for a second file after the first, and for fewer
    frames than the file states.
    """
    first = parse_header(int.from_bytes(data[:4], "big"))
    if first is None:
        raise AudioError("not_audio", f"starts with {data[:4].hex()}, which is no MPEG frame")
    has_count = data[first.side_end : first.side_end + 4] in _COUNT_MARKS
    num_frames = _num_frames(data, first) - has_count
    stated = _stated_count(data, first) if has_count else 0
    if stated > num_frames + 1:  # some writers count the "Info" frame itself
        raise AudioError("truncated", f"{num_frames} of the {stated} frames that the file states")
    num_samples = num_frames * first.num_samples
    if stated == num_frames or first.kind[1] != _LAYER_III:
        return data, num_samples
    if stated == num_frames + 1:  # libsndfile would expect a frame more; LAME's tag stays
        place = first.side_end + _COUNT_OFFSET
        counted = num_frames.to_bytes(4, "big")
        return data[:place] + counted + data[place + len(counted) :], num_samples
    sound = data[first.num_bytes :] if has_count else data
    return _info_frame(data, num_frames) + sound, num_samples


_ZEROS = re.compile(rb"\0*")


def without_tags(data: bytes) -> bytes:
    """Return what follows the ID3 tags at the start, and the zeros after them."""
    start = 0
    while data.startswith(b"ID3", start) and start + _ID3_HEADER_BYTES <= len(data):
        # Four bytes of seven bits state the size; bit 4 of the flags, a footer like the header.
        size = (
            data[start + 6] << 21 | data[start + 7] << 14 | data[start + 8] << 7 | data[start + 9]
        )
        footer = _ID3_HEADER_BYTES if data[start + 5] & 0x10 else 0
        start += _ID3_HEADER_BYTES + size + footer
        # No copy of the rest: a file may begin with a million tags.
        zeros = _ZEROS.match(data, min(start, len(data)))
        assert zeros is not None, "none are zeros too"
        start = zeros.end()
    return data[start:] if start else data


def _num_frames(data: bytes, first: Header) -> int:
    """Count the frames from the first byte to the last; AudioError where one is missing."""
    num_frames, position = 0, 0
    header: Header | None = first
    while header is not None:
        mark = position + header.side_end
        if header.kind != first.kind or (num_frames and data[mark : mark + 4] in _COUNT_MARKS):
            raise AudioError("joined_files", f"another file begins at byte {position}")
        num_frames += 1
        position += header.num_bytes
        header = parse_header(int.from_bytes(data[position : position + 4], "big"))
    _require_end(data, position, num_frames)
    return num_frames


def _require_end(data: bytes, position: int, num_frames: int) -> None:
    rest = data[position:].lstrip(b"\0")
    if position > len(data):
        raise AudioError("truncated", f"the last frame needs {position - len(data)} more bytes")
    behind_tags = without_tags(rest)
    if len(behind_tags) < len(rest) and parse_header(int.from_bytes(behind_tags[:4], "big")):
        raise AudioError("joined_files", f"another file begins at byte {len(data) - len(rest)}")
    if behind_tags and not behind_tags.startswith(_TAGS_AT_END):
        reason: AudioReason = "truncated" if num_frames > 1 else "not_audio"
        raise AudioError(reason, f"no frame at byte {position}, where frame {num_frames} ends")


def _stated_count(data: bytes, first: Header) -> int:
    place = first.side_end + _COUNT_OFFSET
    has_count = int.from_bytes(data[place - 1 : place], "big") & 1  # 0 where the file ends before
    return int.from_bytes(data[place : place + 4], "big") if has_count else 0


def _info_frame(data: bytes, num_frames: int) -> bytes:
    word = int.from_bytes(data[:4], "big") & ~_BIT_RATE | _MIDDLE_BIT_RATE | _UNPROTECTED
    header = parse_header(word)
    assert header is not None, "made from a header that was read"
    start = word.to_bytes(4, "big").ljust(header.side_end, b"\0")
    return (start + struct.pack(">4sII", b"Info", 1, num_frames)).ljust(header.num_bytes, b"\0")


def open_mp3(content: bytes, conversion: AudioConversion) -> AudioFile:
    """Open a whole MP3, whose tags are gone."""
    counted, num_samples = counted_mp3(content)
    file = open_by_libsndfile(counted, conversion)
    least = num_samples - _padding_samples(file.rate_hz)
    return replace(file, min_samples=least, padding_samples=_padding_at_16_khz(file.rate_hz))


def mp3_duration_s(read: Read, num_bytes: int) -> float | None:
    """Count the frames of an MP3, which its header need not state."""
    counted, _ = counted_mp3(read_whole(read, num_bytes))
    return duration_by_libsndfile(reader_of(counted), len(counted))


def _padding_samples(rate_hz: int) -> int:
    """Return the samples that encoder and decoder may add at this rate."""
    # MPEG-1 has the rates from 32 kHz on.
    return _PADDING_FRAMES * (1152 if rate_hz >= min(_RATES_HZ[_MPEG_1]) else 576)


def _padding_at_16_khz(rate_hz: int) -> int:
    return math.ceil(_padding_samples(rate_hz) * SAMPLE_RATE_HZ / rate_hz)


MP3 = Codec(
    "MP3",
    lambda head: head[:1] == b"\xff" and head[1:2] >= b"\xe0",
    open_mp3,
    mp3_duration_s,
    _padding_at_16_khz,
)
