"""Detect truncated WAV and OGG files, which libsndfile shortens silently."""

import struct

# What writers to a pipe state: ffmpeg and Kaldi, some, and SoX.
_OPEN_LENGTHS = {0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x7FFFF024}
_OGG_HEADER = struct.Struct("<4sBBqIIIB")
_END_OF_STREAM = 4
_OPUS_GRANULES_PER_SAMPLE = 3  # Opus counts at 48 kHz whatever the rate


def riff_shortfall(data: bytes) -> int:
    """Count the bytes that a WAV's header or its data chunk promises beyond the end.

    0 if nothing is missing, or the length is left open.
    """
    # A missing pad byte is common and harms nothing.
    missing = max(_stated_end(data, 4), _stated_end(data, _data_size_position(data))) - len(data)
    return missing if missing > 1 else 0


def _stated_end(data: bytes, position: int) -> int:
    num_bytes = int.from_bytes(data[position : position + 4], "little")
    return 0 if num_bytes in _OPEN_LENGTHS else position + 4 + num_bytes


def _data_size_position(data: bytes) -> int:
    position = 12  # after "RIFF", its size and "WAVE"
    while position < len(data) and data[position : position + 4] != b"data":
        num_bytes = int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8 + num_bytes + num_bytes % 2
    return position + 4


def ogg_num_samples(data: bytes) -> int:
    """Count samples by the last page's granule position; ValueError unless it ends the stream.

    For Opus that includes a pre-skip of some 0.1 s.
    """
    position, granule, flags = 0, 0, 0
    while data[position : position + 4] == b"OggS":
        if position + _OGG_HEADER.size > len(data):
            raise ValueError(f"page at byte {position} has half a header")
        *_, flags, granule, _, _, _, num_segments = _OGG_HEADER.unpack_from(data, position)
        start = position + _OGG_HEADER.size
        end = start + num_segments + sum(data[start : start + num_segments])
        if end > len(data):
            raise ValueError(f"page at byte {position} needs {end - len(data)} more bytes")
        position = end
    if not flags & _END_OF_STREAM:
        raise ValueError(f"no page ends the stream; the pages stop at byte {position}")
    if granule < 0:
        raise ValueError("the page that ends the stream does not state its position")
    return granule // (_OPUS_GRANULES_PER_SAMPLE if b"OpusHead" in data[:64] else 1)
