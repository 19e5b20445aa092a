"""Open an audio file of any accepted container: what it states, and its samples in blocks.

Whole files and segments of recordings are opened here, so that the damage that refuses the one
refuses the others.
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import soundfile
from jaxtyping import Float32

from pipeline.audio.conversion import AudioConversion
from pipeline.audio.errors import AudioError
from pipeline.audio.flac import Md5OfSamples, flac_blocks, stream_info
from pipeline.audio.mp3 import counted_mp3, padding_samples, without_tags
from pipeline.audio.ogg import ended_ogg, ogg_num_samples
from pipeline.audio.wav import WavLayout, is_wav, wav_layout
from pipeline.filterbank import SAMPLE_RATE_HZ

Block: TypeAlias = Float32[np.ndarray, "_samples channels"]

UNKNOWN_LENGTH = 2**63 - 1
"""libsndfile's word for a file that does not state its length."""

_BLOCK_SAMPLES = 2**16
_OPUS_PADDING = 1_600  # the usual pre-skip of 80 ms, and a packet of 20 ms
_OGG_SHORTFALLS_PER_S = 8  # an eighth of a second, where a stream's first granule is not zero
_KNOWN = (b"fLaC", b"OggS")
_OTHERS = {
    b"RIFX": "a big-endian WAV",
    b"riff": "a W64",
    b"NIST": "a NIST SPHERE",
    b"ajkg": "a Shorten",
    b".snd": "an AU",
    b"FORM": "an AIFF",
    b"caff": "a CAF",
    b"\x1aE\xdf\xa3": "a WebM or Matroska",
    b"#!AM": "an AMR",
}


class _Stream(soundfile.SoundFile):
    """_Stream does not seek behind each block, upon which an MP3 loses what earlier frames left."""

    def seekable(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class AudioFile:
    """AudioFile holds what a file states, and decodes it by blocks from its start.

    `num_samples` are stated, of each channel, and at least `min_samples` must be decoded.
    `padding_samples` are those at 16 kHz that its encoder and decoder may add. `content` are the
    bytes without tags before them.
    """

    content: bytes
    rate_hz: int
    num_channels: int
    num_samples: int
    blocks: Callable[[], Iterator[Block]]
    min_samples: int = 0
    padding_samples: int = 0

    def cut(self, cuts: Sequence[tuple[int, int]], md5: Md5OfSamples | None = None) -> list[Block]:
        """Decode all, and keep the samples in the cuts: the first one of each, and their number.

        AudioError unless all that the file states is decoded. An `md5` counts all of it.
        """
        kept = [np.empty((count, self.num_channels), np.float32) for _, count in cuts]
        position = 0
        for block in self.blocks():
            if cuts == [(0, len(block))]:
                kept = [block]  # an utterance is one block, which need not be copied
            for (first, count), samples in zip(cuts, kept, strict=True):
                start, end = max(first, position), min(first + count, position + len(block))
                if start < end:
                    samples[start - first : end - first] = block[start - position : end - position]
            if md5 is not None:
                md5.add(block.reshape(-1))
            position += len(block)
        _require_decoded(position, max(self.num_samples, self.min_samples))
        return kept


def open_audio(data: bytes, conversion: AudioConversion) -> AudioFile:
    """Open the bytes of a WAV, FLAC, OGG (Vorbis, Opus) or MP3 file.

    AudioError for other bytes, for another rate or other channels than `conversion` accepts, and
    for all damage that can be found without decoding.
    """
    if not data:
        raise AudioError("empty_object", "the object has 0 bytes")
    content = without_tags(data)
    require_known(content)
    if is_wav(content):
        return _wav(content, conversion)
    if content.startswith(b"fLaC"):
        return _flac(content, conversion)
    return _ogg(content, conversion) if content.startswith(b"OggS") else _mp3(content, conversion)


def require_known(content: bytes) -> None:
    """Raise AudioError unless bytes begin as a file of an accepted container."""
    is_mpeg_frame = len(content) > 1 and content[0] == 0xFF and content[1] & 0xE0 == 0xE0
    if is_mpeg_frame or content.startswith(_KNOWN) or is_wav(content):
        return
    name = _OTHERS.get(content[:4]) or ("an MP4" if content[4:8] == b"ftyp" else None)
    said = f"starts with {content[:4]!r}" + (f", {name} file" if name else "")
    raise AudioError("not_audio", f"{said}: need WAV, FLAC, OGG or MP3; convert it")


def _wav(content: bytes, conversion: AudioConversion) -> AudioFile:
    def read(first: int, num_bytes: int) -> bytes:
        return content[first : first + num_bytes]

    layout = wav_layout(read, len(content))
    conversion.require_accepted(layout.rate_hz, layout.num_channels)
    layout.require_whole(read)
    if layout.is_pcm_16:
        stated = layout.rate_hz, layout.num_channels, layout.num_samples
        return AudioFile(content, *stated, partial(_pcm_blocks, content, layout))
    if not layout.frame_bytes:
        return _by_libsndfile(content, conversion)
    # As a segment is read, so that nothing but format and samples can make a difference.
    file = _by_libsndfile(layout.wav(content[layout.start : layout.end]), conversion)
    if file.num_samples != layout.num_samples:
        detail = f"{file.num_samples} samples in the bytes of {layout.num_samples}"
        raise AudioError("not_audio", f"a WAV whose format contradicts itself: {detail}")
    return file


def _pcm_blocks(content: bytes, layout: WavLayout) -> Iterator[Block]:
    # The samples that libsndfile gives, in a fifth of its time.
    for first in range(0, layout.num_samples, _BLOCK_SAMPLES):
        num_samples = min(_BLOCK_SAMPLES, layout.num_samples - first)
        place = num_samples * layout.num_channels, layout.start + first * layout.frame_bytes
        integers = np.frombuffer(content, "<i2", *place)
        block = np.multiply(integers, np.float32(1 / 2**15), dtype=np.float32)
        yield block.reshape(num_samples, layout.num_channels)


def _flac(content: bytes, conversion: AudioConversion) -> AudioFile:
    try:
        info = stream_info(content)
    except ValueError as error:
        raise AudioError("not_audio", str(error)) from error
    conversion.require_accepted(info.sample_rate_hz, info.num_channels)
    _require_known_length(info.num_samples or UNKNOWN_LENGTH)
    stated = info.sample_rate_hz, info.num_channels, info.num_samples
    return AudioFile(content, *stated, partial(flac_blocks, content, info))


def _ogg(content: bytes, conversion: AudioConversion) -> AudioFile:
    is_opus = b"OpusHead" in content[:64]  # Vorbis states its end exactly
    padding = _OPUS_PADDING if is_opus else 0
    file = _by_libsndfile(ended_ogg(content), conversion)
    stated = ogg_num_samples(content, file.rate_hz)
    min_samples = stated - file.rate_hz // _OGG_SHORTFALLS_PER_S
    _require_decoded(file.num_samples, min_samples)
    return replace(file, padding_samples=padding)


def _mp3(content: bytes, conversion: AudioConversion) -> AudioFile:
    counted, num_samples = counted_mp3(content)
    file = _by_libsndfile(counted, conversion)
    padding = padding_samples(file.rate_hz)
    at_16_khz = math.ceil(padding * SAMPLE_RATE_HZ / file.rate_hz)
    return replace(file, min_samples=num_samples - padding, padding_samples=at_16_khz)


def _by_libsndfile(content: bytes, conversion: AudioConversion) -> AudioFile:
    try:
        file = _Stream(io.BytesIO(content))
    except soundfile.LibsndfileError as error:
        raise AudioError("not_audio", error.error_string) from error
    conversion.require_accepted(file.samplerate, file.channels)
    _require_known_length(file.frames)
    stated = file.samplerate, file.channels, file.frames
    return AudioFile(content, *stated, partial(_blocks, file))


def _blocks(file: soundfile.SoundFile) -> Iterator[Block]:
    with file:
        for first in range(0, file.frames, _BLOCK_SAMPLES):
            num_samples = min(_BLOCK_SAMPLES, file.frames - first)
            try:
                yield file.read(num_samples, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError as error:
                raise AudioError("truncated", error.error_string) from error


def _require_decoded(num_samples: int, expected: int) -> None:
    if num_samples < expected:
        detail = f"decoded {num_samples} of the {expected} samples that the header says"
        raise AudioError("truncated", detail)


def _require_known_length(num_samples: int) -> None:
    if num_samples == UNKNOWN_LENGTH:
        detail = "the header does not state its length, as when written to a pipe: encode to a file"
        raise AudioError("unknown_length", detail)
