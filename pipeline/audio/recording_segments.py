"""Cut segments out of a long recording, each as the bytes of a WAV of its own.

A segment is so decoded, checked and converted like an object that holds its samples alone. Of a
WAV the samples are a range of bytes. Other containers are decoded once, from the start, as a
decoder that jumps into the middle may give other samples (of MP3, by what earlier frames left).
"""

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import soundfile
from jaxtyping import Float32

from pipeline.audio.container import ogg_num_samples
from pipeline.audio.conversion import AudioConversion
from pipeline.audio.decode import MAX_DURATION_S, without_id3
from pipeline.audio.errors import AudioError
from pipeline.audio.flac import Md5OfSamples
from pipeline.audio.mp3 import counted_mp3
from pipeline.audio_parts import Segment

HEAD_BYTES = 2**16
"""Nearly all WAVs have their header within the first 64 KB."""

MAX_OVERSHOOT_S = 0.5
"""A segment may end so much behind the recording's end, as for Kaldi's extract-segments."""

_BLOCK_SAMPLES = 2**16
_SAMPLES_BY_TAG = {1, 3, 6, 7}  # PCM, float, A-law and mu-law: every sample has its own bytes
_EXTENSIBLE, _FLOAT = 0xFFFE, 3
_UNKNOWN_LENGTH = 2**63 - 1


@dataclass(frozen=True, slots=True)
class WavLayout:
    """WavLayout holds a WAV's format chunk, and where its samples lie in the object."""

    format_chunk: bytes
    num_channels: int
    rate_hz: int
    sample_bytes: int
    start: int
    num_samples: int

    def range_of(self, segment: Segment, conversion: AudioConversion) -> tuple[int, int]:
        """Return the segment's first byte and their number.

        AudioError beyond the end, and for a rate or channels that are not accepted: these have up
        to 24 times the bytes that were expected.
        """
        conversion.require_accepted(self.rate_hz, self.num_channels)
        first, count = segment_samples(segment, self.rate_hz, self.num_samples)
        return self.start + first * self.sample_bytes, count * self.sample_bytes

    def wav(self, samples: bytes) -> bytes:
        """Return a WAV of these bytes of samples."""
        return wav_file(self.format_chunk, samples)


def wav_layout(head: bytes, object_bytes: int) -> WavLayout | None:
    """Read a WAV's header; None for other bytes, and where samples have no bytes of their own."""
    if not (head.startswith(b"RIFF") and head[8:12] == b"WAVE"):
        return None
    chunks = dict(_chunks(head))
    position, size = chunks.get(b"fmt ", (0, 0))
    start, stated = chunks.get(b"data", (0, 0))
    form = head[position : position + size]
    if not start or len(form) < 16 or len(form) < size:
        return None
    tag, num_channels, rate_hz, _, sample_bytes, _ = struct.unpack("<HHIIHH", form[:16])
    if tag == _EXTENSIBLE:
        tag = int.from_bytes(form[24:26], "little")
    if tag not in _SAMPLES_BY_TAG or not rate_hz or not sample_bytes:
        return None
    # A header's length may be left open, and an object may have been cut.
    num_bytes = min(stated, max(object_bytes - start, 0))
    num_samples = num_bytes // sample_bytes
    return WavLayout(form, num_channels, rate_hz, sample_bytes, start, num_samples)


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


def wav_file(format_chunk: bytes, samples: bytes) -> bytes:
    """Write a WAV of a format chunk and samples."""
    pad = b"\0" * (len(samples) % 2)
    content = b"WAVE" + _chunk(b"fmt ", format_chunk) + _chunk(b"data", samples) + pad
    return _chunk(b"RIFF", content)


def cut_recording(
    data: bytes, segments: Sequence[Segment], conversion: AudioConversion
) -> list[bytes | AudioError]:
    """Decode a recording once, and return each segment as a WAV at its rate, or its fault.

    Beside `data`, the segments alone are in memory. AudioError if no segment can be read.
    """
    file = _opened(data, conversion)
    with file:
        cuts: list[tuple[int, int] | AudioError] = []
        for segment in segments:
            try:
                cuts.append(segment_samples(segment, file.samplerate, file.frames))
            except AudioError as error:
                cuts.append(error)
        wanted = [cut for cut in cuts if not isinstance(cut, AudioError)]
        samples = iter(_decoded(file, data, wanted) if wanted else ())
        form = _float_format(file.samplerate, file.channels)
        return [
            cut if isinstance(cut, AudioError) else wav_file(form, next(samples).tobytes())
            for cut in cuts
        ]


def _opened(data: bytes, conversion: AudioConversion) -> soundfile.SoundFile:
    content = without_id3(data)
    if not content:
        raise AudioError("empty_object", "the object has 0 bytes")
    if content[:1] == b"\xff":
        content, _ = counted_mp3(content)
    try:
        file = soundfile.SoundFile(io.BytesIO(content))
    except soundfile.LibsndfileError as error:
        raise AudioError("not_audio", error.error_string) from error
    conversion.require_accepted(file.samplerate, file.channels)
    if file.frames == _UNKNOWN_LENGTH:
        raise AudioError("unknown_length", "the header does not state its length: encode to a file")
    if content.startswith(b"OggS"):
        ogg_num_samples(content, file.samplerate)  # all pages are whole, and one follows another
    return file


def _decoded(
    file: soundfile.SoundFile, data: bytes, cuts: Sequence[tuple[int, int]]
) -> list[Float32[np.ndarray, "samples channels"]]:
    """Decode from the start to the end, and keep what is in the cuts: first sample and number."""
    kept = [np.empty((count, file.channels), np.float32) for _, count in cuts]
    md5, position = Md5OfSamples.of(without_id3(data)), 0
    for block in _blocks(file):
        for (first, count), samples in zip(cuts, kept, strict=True):
            start, end = max(first, position), min(first + count, position + len(block))
            if start < end:
                samples[start - first : end - first] = block[start - position : end - position]
        md5.add(block.reshape(-1))
        position += len(block)
    if position < file.frames:
        detail = f"decoded {position} of the {file.frames} samples that the header says"
        raise AudioError("truncated", detail)
    md5.require()
    return kept


def _blocks(file: soundfile.SoundFile) -> Iterator[Float32[np.ndarray, "samples channels"]]:
    try:
        while len(block := file.read(_BLOCK_SAMPLES, dtype="float32", always_2d=True)):
            yield block
    except soundfile.LibsndfileError as error:
        raise AudioError("truncated", error.error_string) from error


def _float_format(rate_hz: int, num_channels: int) -> bytes:
    width = 4 * num_channels
    return struct.pack("<HHIIHH", _FLOAT, num_channels, rate_hz, rate_hz * width, width, 32)


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content


def _chunks(head: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Yield each chunk's name, with the position and the stated size of its content."""
    position = 12  # after "RIFF", its size and "WAVE"
    while position + 8 <= len(head):
        size = int.from_bytes(head[position + 4 : position + 8], "little")
        yield head[position : position + 4], (position + 8, size)
        position += 8 + size + size % 2
