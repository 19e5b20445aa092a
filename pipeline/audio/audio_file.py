"""What a codec is, and the audio file that it opens: what the file states, its samples in blocks.

Whole files and segments of recordings are opened alike, so that the damage that refuses the one
refuses the others.
"""

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import soundfile
from jaxtyping import Float32

from pipeline.audio.conversion import require_accepted
from pipeline.audio.errors import AudioError
from pipeline.settings import AudioConversion

Block: TypeAlias = Float32[np.ndarray, "_samples channels"]

Read: TypeAlias = Callable[[int, int], bytes]
"""Return so many bytes of an object from a first one on; fewer where the object ends."""

BLOCK_SAMPLES = 2**16
MAX_RECORDING_BYTES = 512 * 2**20
"""The largest compressed file that is read whole: 9 h of MP3 at 128 kbit/s."""

_UNKNOWN_LENGTH = 2**63 - 1
"""libsndfile's word for a file that does not state its length."""


@dataclass(frozen=True, slots=True)
class StatedMd5:
    """StatedMd5 is the MD5 that a file states of its samples, interleaved by channel.

    It is of little-endian integers, of as many bytes as the `bits` of a sample need, at most 24.
    """

    bits: int
    digest: bytes

    def integers(self, samples: Float32[np.ndarray, "..."]) -> memoryview:
        """Return the bytes that the MD5 is of."""
        num_bytes = (self.bits + 7) // 8
        scaled = samples.reshape(-1) * np.float32(2 ** (self.bits - 1))
        integers = scaled.astype("<i4" if num_bytes == 3 else f"<i{num_bytes}").view(np.uint8)
        if num_bytes == 3:
            integers = integers.reshape(-1, 4)[:, :3].copy()
        return integers.data

    def require(self, samples: Float32[np.ndarray, "..."]) -> None:
        """Raise AudioError if the samples have another MD5."""
        self.require_digest(hashlib.md5(self.integers(samples), usedforsecurity=False).digest())

    def require_digest(self, found: bytes) -> None:
        """Raise AudioError if `found` is another MD5."""
        if found != self.digest:
            detail = f"MD5 of the samples is {found.hex()}, the header says {self.digest.hex()}"
            raise AudioError("checksum_mismatch", detail)


@dataclass(frozen=True, slots=True)
class AudioFile:
    """AudioFile holds what a file states, and decodes it by blocks from its start.

    `num_samples` are stated, of each channel, and at least `min_samples` must be decoded.
    `padding_samples` are those at 16 kHz that its encoder and decoder may add.
    """

    rate_hz: int
    num_channels: int
    num_samples: int
    blocks: Callable[[], Iterator[Block]]
    min_samples: int = 0
    padding_samples: int = 0
    md5: StatedMd5 | None = None

    def cut(self, cuts: Sequence[tuple[int, int]], *, compares_md5: bool = True) -> list[Block]:
        """Decode all, and keep the samples in the cuts: the first one of each, and their number.

        AudioError unless all that the file states is decoded, with the MD5 that it states.
        """
        kept = [np.empty((count, self.num_channels), np.float32) for _, count in cuts]
        position, md5 = 0, hashlib.md5(usedforsecurity=False)
        for block in self.blocks():
            if not position and cuts == [(0, len(block))]:
                kept = [block]  # an utterance is the first block, which need not be copied
            for (first, count), samples in zip(cuts, kept, strict=True):
                start, end = max(first, position), min(first + count, position + len(block))
                if start < end:
                    samples[start - first : end - first] = block[start - position : end - position]
            if compares_md5 and self.md5:
                md5.update(self.md5.integers(block))
            position += len(block)
        require_decoded(position, max(self.num_samples, self.min_samples))
        if compares_md5 and self.md5:
            self.md5.require_digest(md5.digest())
        return kept


@dataclass(frozen=True, slots=True)
class Codec:
    """Codec reads the files of one container; pipeline/audio/codecs.py lists all of them.

    `is_ours` recognizes a file by its first bytes, of which ID3 tags are no part. `open` finds all
    damage that can be found without decoding. `duration_s` says how long a file lasts, by what it
    states or by counting, from the parts that it reads of so many bytes; None if that is unknown.
    `padding_samples` are the most, at 16 kHz, that encoder and decoder may add to audio of a rate.
    """

    name: str
    is_ours: Callable[[bytes], bool]
    open: Callable[[bytes, AudioConversion], AudioFile]
    duration_s: Callable[[Read, int], float | None]
    padding_samples: Callable[[int], int] = lambda _: 0


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
"""What files that are not read begin with, for messages."""


def other_form(head: bytes) -> str:
    """Return which form a file has that is not read, by its first 8 bytes; "" if unknown."""
    return _OTHERS.get(head[:4], "an MP4" if head[4:8] == b"ftyp" else "")


def reader_of(data: bytes) -> Read:
    """Return what reads bytes that are in memory."""
    return lambda first, num_bytes: data[first : first + num_bytes]


def read_whole(read: Read, num_bytes: int) -> bytes:
    """Read all bytes of a file; AudioError for one that is too large."""
    if num_bytes > MAX_RECORDING_BYTES:
        detail = f"{num_bytes} bytes: need at most {MAX_RECORDING_BYTES}"
        raise AudioError("too_long", detail)
    return read(0, num_bytes)


class _Stream(soundfile.SoundFile):
    """_Stream does not seek after each block, by which an MP3 loses the state of earlier frames."""

    def seekable(self) -> bool:
        return False


def open_by_libsndfile(content: bytes, conversion: AudioConversion) -> AudioFile:
    """Open a file of any container that libsndfile knows."""
    try:
        file = _Stream(io.BytesIO(content))
    except soundfile.LibsndfileError as error:
        raise AudioError("not_audio", error.error_string) from error
    require_accepted(conversion, file.samplerate, file.channels)
    require_known_length(None if file.frames == _UNKNOWN_LENGTH else file.frames)
    return AudioFile(file.samplerate, file.channels, file.frames, partial(_blocks, file))


def duration_by_libsndfile(read: Read, num_bytes: int) -> float | None:
    """Read how long a file lasts, of any container that libsndfile knows; None if unknown."""
    try:
        info = soundfile.info(io.BytesIO(read_whole(read, num_bytes)))
    except soundfile.LibsndfileError:
        return None
    return None if info.frames == _UNKNOWN_LENGTH else float(info.duration)


def _blocks(file: soundfile.SoundFile) -> Iterator[Block]:
    with file:
        for first in range(0, file.frames, BLOCK_SAMPLES):
            num_samples = min(BLOCK_SAMPLES, file.frames - first)
            try:
                block = file.read(num_samples, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError as error:
                raise AudioError("truncated", error.error_string) from error
            yield block
            if len(block) < num_samples:  # a header may state years: who counts finds it truncated
                return


def require_decoded(num_samples: int, expected: int) -> None:
    """Raise AudioError for fewer samples than expected."""
    if num_samples < expected:
        detail = f"decoded {num_samples} of the {expected} samples that the header says"
        raise AudioError("truncated", detail)


def require_known_length(num_samples: int | None) -> None:
    """Raise AudioError for a file that does not state its length."""
    if num_samples is None:
        detail = "the header does not state its length, as when written to a pipe: encode to a file"
        raise AudioError("unknown_length", detail)
