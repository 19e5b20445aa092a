"""The table of codecs, and what any audio file is read by.

To read another container, write a file beside wav.py with its `Codec`, and add it to `CODECS`.
"""

from pipeline.audio.audio_file import (
    AudioFile,
    Codec,
    Read,
    duration_by_libsndfile,
    other_form,
    read_whole,
    reader_of,
)
from pipeline.audio.errors import AudioError
from pipeline.audio.flac import FLAC
from pipeline.audio.mp3 import MP3, without_tags
from pipeline.audio.ogg import OGG
from pipeline.audio.wav import WAV
from pipeline.settings import AudioConversion

CODECS: tuple[Codec, ...] = (WAV, FLAC, OGG, MP3)

_ID3 = b"ID3"
_SIGNATURE_BYTES = 64


def is_audio(head: bytes) -> bool:
    """Return whether bytes begin as an audio file that is read, or as a tag before one."""
    return head.startswith(_ID3) or any(each.is_ours(head) for each in CODECS)


def codec_of(content: bytes) -> Codec:
    """Return the codec of a file by its first bytes; AudioError for another container."""
    if found := next((each for each in CODECS if each.is_ours(content)), None):
        return found
    name = other_form(content)
    said = f"starts with {content[:4]!r}" + (f", {name} file" if name else "")
    *names, last = (each.name for each in CODECS)
    raise AudioError("not_audio", f"{said}: need {', '.join(names)} or {last}; convert it")


def open_audio(data: bytes, conversion: AudioConversion) -> AudioFile:
    """Open the bytes of a file.

    AudioError for other bytes, for another rate or other channels than `conversion` accepts, and
    for all damage that can be found without decoding.
    """
    if not data:
        raise AudioError("empty_object", "the object has 0 bytes")
    content = without_tags(data)
    return codec_of(content).open(content, conversion)


def stated_duration_s(read: Read, num_bytes: int) -> float | None:
    """Read how long a file lasts, at any rate, without decoding; None if that is unknown.

    It is the length that `decode_audio` finds, so an MP3's frames are counted.
    """
    try:
        if read(0, len(_ID3)) == _ID3:
            content = without_tags(read_whole(read, num_bytes))
            if len(content) == num_bytes:  # shorter than a tag
                return None
            return stated_duration_s(reader_of(content), len(content))
        head = read(0, _SIGNATURE_BYTES)
        ours = (each.duration_s for each in CODECS if each.is_ours(head))
        # What another container's file is, extraction reports.
        return next(ours, duration_by_libsndfile)(read, num_bytes)
    except AudioError:
        return None


def max_padding_samples(rate_hz: int) -> int:
    """Return the most samples at 16 kHz that any encoder and decoder add to audio of a rate."""
    return max(each.padding_samples(rate_hz) for each in CODECS)
