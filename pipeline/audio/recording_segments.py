"""Cut segments out of a long recording, each as the bytes of a WAV of its own.

A segment is so decoded, checked and converted like an object that holds its samples alone. Of a
WAV the samples are a range of bytes. Other containers are decoded once, from the start, as a
decoder that jumps into the middle may give other samples (of MP3, by what earlier frames left).
"""

import struct
from collections.abc import Sequence

from pipeline.audio.audio_file import open_audio
from pipeline.audio.conversion import AudioConversion
from pipeline.audio.decode import MAX_DURATION_S
from pipeline.audio.errors import AudioError
from pipeline.audio.flac import Md5OfSamples
from pipeline.audio.wav import wav_file
from pipeline.audio_parts import Segment

HEAD_BYTES = 2**16
"""Nearly all WAVs have their header within the first 64 KB."""

MAX_OVERSHOOT_S = 0.5
"""A segment may end so much behind the recording's end, as for Kaldi's extract-segments."""

_FLOAT = 3


def segment_samples(segment: Segment, rate_hz: int, num_samples: int) -> tuple[int, int]:
    """Return a segment's first sample and their number.

    AudioError if the recording ends before, or if the segment is longer than what is decoded.
    """
    first, count = round(segment.start_s * rate_hz), round(segment.duration_s * rate_hz)
    beyond = first + count - num_samples
    if first >= num_samples or beyond > MAX_OVERSHOOT_S * rate_hz:
        ends_s, lasts_s = segment.start_s + segment.duration_s, num_samples / rate_hz
        detail = f"ends at {ends_s:.3f} s: need at most {lasts_s:.3f} s, the recording's end"
        raise AudioError("segment_beyond_end", detail)
    # Before anything is read: three hours of a FLAC took 2.2 GB, to be refused then.
    if count > MAX_DURATION_S * rate_hz:
        detail = f"a segment of {segment.duration_s:.3f} s: need at most {MAX_DURATION_S} s"
        raise AudioError("too_long", detail)
    return first, min(count, num_samples - first)


def cut_recording(
    data: bytes, segments: Sequence[Segment], conversion: AudioConversion
) -> list[bytes | AudioError]:
    """Decode a recording once, and return each segment as a WAV at its rate, or its fault.

    Beside `data`, the segments alone are in memory. AudioError if no segment can be read.
    """
    file = open_audio(data, conversion)
    cuts: list[tuple[int, int] | AudioError] = []
    for segment in segments:
        try:
            cuts.append(segment_samples(segment, file.rate_hz, file.num_samples))
        except AudioError as error:
            cuts.append(error)
    wanted = [cut for cut in cuts if not isinstance(cut, AudioError)]
    samples = iter(file.cut(wanted, Md5OfSamples.of(file.content)) if wanted else ())
    form = _float_format(file.rate_hz, file.num_channels)
    return [
        cut if isinstance(cut, AudioError) else wav_file(form, next(samples).tobytes())
        for cut in cuts
    ]


def _float_format(rate_hz: int, num_channels: int) -> bytes:
    width = 4 * num_channels
    return struct.pack("<HHIIHH", _FLOAT, num_channels, rate_hz, rate_hz * width, width, 32)
