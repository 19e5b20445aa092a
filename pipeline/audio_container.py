"""Whether a WAV or OGG file is all there: libsndfile shortens truncated ones silently."""

import struct

STREAMED_RIFF_BYTES = 0xFFFFFFFF
_OGG_HEADER = struct.Struct("<4sBBqIIIB")
_END_OF_STREAM = 4
_OPUS_GRANULES_PER_SAMPLE = 3  # Opus counts at 48 kHz whatever the rate


def riff_shortfall(data: bytes) -> int:
    """Count the bytes that a WAV header promises beyond the end; 0 if it leaves its length open."""
    num_bytes = int.from_bytes(data[4:8], "little")
    # A missing pad byte is common and harms nothing.
    if num_bytes == STREAMED_RIFF_BYTES or num_bytes + 8 <= len(data) + 1:
        return 0
    return num_bytes + 8 - len(data)


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
    return granule // (_OPUS_GRANULES_PER_SAMPLE if b"OpusHead" in data[:64] else 1)
