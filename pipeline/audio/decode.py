"""Bytes to 16 kHz mono samples, or a named reason why not (paper 003 IV-B2)."""

import io
import math
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import soundfile
from jaxtyping import Float32

from pipeline.audio.container import ogg_num_samples, require_one_wav, require_whole_wav
from pipeline.audio.conversion import NO_CONVERSION, AudioConversion, resample
from pipeline.audio.duration import duration_tolerance, is_rounded_from, require_duration
from pipeline.audio.errors import AudioError
from pipeline.audio.flac import decode_flac, require_md5, stream_info
from pipeline.audio.mp3 import counted_mp3, padding_samples
from pipeline.filterbank import SAMPLE_RATE_HZ, WINDOW_SAMPLES
from pipeline.filterbank.log_mel import Engine

__all__ = ["AudioError", "require_duration"]

MAX_DURATION_S = 3600
MAX_CLIPPED_SHARE = 0.01
MP3_PADDING = padding_samples(SAMPLE_RATE_HZ)
MAX_PEAK = 4.0  # lossy decoders overshoot 1 a little; 1e30 would ruin its speaker's mean
SILENCE_DBFS = -90.0
MD5_ONE_IN: dict[Engine, int] = {"fast": 4, "kaldi": 1}
"""The share of FLACs whose MD5 is compared, by filter bank, so that it costs below 5 % of the step.

Comparing every one takes 11 % of a step with the fast filter bank.
"""

_OPUS_PADDING = 1_600  # the usual pre-skip of 80 ms, and a packet of 20 ms
_MAX_SAMPLE_BYTES = 8  # a WAV of doubles
_MAX_METADATA_BYTES = 2**24  # the largest block of a FLAC, such as a picture
_UNKNOWN_LENGTH = 2**63 - 1  # libsndfile's word for a FLAC that was written to a pipe
_FULL_SCALE = np.float32(32767 / 32768)
_OGG_SHORTFALLS_PER_S = 8  # an eighth of a second, where a stream's first granule is not zero
_ID3_HEADER_BYTES = 10


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording holds a file's samples as it has them, at its own rate."""

    samples: Float32[np.ndarray, "samples channels"]
    rate_hz: int

    @property
    def form(self) -> str | None:
        """Return its rate and number of channels, as a shard states them; None of 16 kHz mono."""
        num_channels = self.samples.shape[1]
        is_plain = (self.rate_hz, num_channels) == (SAMPLE_RATE_HZ, 1)
        return None if is_plain else f"{self.rate_hz} Hz, {num_channels} ch"

    def converted(self, conversion: AudioConversion) -> Float32[np.ndarray, " samples"]:
        """Return 16 kHz mono samples; AudioError if they are of no use."""
        heard = conversion.heard_channel(self.samples)
        # As recorded: a filter's overshoot is no clipping.
        _require_usable(heard)
        samples = resample(heard, self.rate_hz)
        _require_window(samples)
        return samples


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoded holds 16 kHz mono samples, and the form of the file if they were converted."""

    samples: Float32[np.ndarray, " samples"]
    audio_form: str | None


def decode_utterance(
    data: bytes,
    utterance_id: str,
    declared_s: float,
    engine: Engine = "fast",
    conversion: AudioConversion = NO_CONVERSION,
) -> Decoded:
    """Decode an utterance's audio, and compare it with its declared duration and its MD5.

    The MD5 of a FLAC is compared for one utterance id in `MD5_ONE_IN`, and wherever the decoded
    length is not what `declared_s` would be rounded or cut from. Raises AudioError.
    """
    content = without_id3(data)
    recording = _read(data, conversion)
    samples = recording.converted(conversion)
    require_duration(samples, declared_s, _codec_padding(content, recording.rate_hz))
    is_doubtful = not is_rounded_from(declared_s, len(samples))
    if content.startswith(b"fLaC") and (is_doubtful or _is_sampled(utterance_id, engine)):
        require_md5(content, recording.samples.reshape(-1))
    return Decoded(samples, recording.form)


def decode_audio(
    data: bytes, conversion: AudioConversion = NO_CONVERSION
) -> Float32[np.ndarray, " samples"]:
    """Decode a WAV, FLAC, OGG (Vorbis, Opus) or MP3 file to 16 kHz mono samples in [-1, 1].

    Raises AudioError naming the reason, such as another rate than `conversion` accepts.
    """
    return _read(data, conversion).converted(conversion)


def stated_duration_s(data: bytes) -> float | None:
    """Read how long a file lasts, at any rate, without decoding; None if that is unknown.

    It is the length that `decode_audio` finds, so an MP3's frames are counted.
    """
    content = without_id3(data)
    try:
        if content[:1] == b"\xff":
            content, _ = counted_mp3(content)
        info = soundfile.info(io.BytesIO(content))
    except (AudioError, soundfile.LibsndfileError):
        return None
    # A FLAC from a pipe does not state its length; libsndfile then reports 2**63 samples.
    return None if info.frames == _UNKNOWN_LENGTH else float(info.duration)


def max_file_bytes(declared_s: float, conversion: AudioConversion = NO_CONVERSION) -> int:
    """Bound the size of a file that `require_duration` may pass, in any of the containers."""
    rates_hz = (SAMPLE_RATE_HZ, *conversion.sample_rates_hz)
    _, surplus_s = duration_tolerance(declared_s, max(map(_mp3_padding, rates_hz)))
    num_samples = math.ceil((declared_s + surplus_s) * conversion.max_samples_per_s)
    return _MAX_METADATA_BYTES + num_samples * _MAX_SAMPLE_BYTES


def _is_sampled(utterance_id: str, engine: Engine) -> bool:
    digest = blake2b(utterance_id.encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big") % MD5_ONE_IN[engine] == 0


def _mp3_padding(rate_hz: int) -> int:
    return math.ceil(padding_samples(rate_hz) * SAMPLE_RATE_HZ / rate_hz)


def _codec_padding(data: bytes, rate_hz: int) -> int:
    """Return the samples at 16 kHz that an encoder and its decoder may add."""
    if data.startswith(b"OggS"):
        return _OPUS_PADDING if b"OpusHead" in data[:64] else 0  # Vorbis states its end exactly
    return 0 if data.startswith((b"RIFF", b"fLaC")) else _mp3_padding(rate_hz)


def without_id3(data: bytes) -> bytes:
    """Return what is behind the ID3 tags at the start."""
    start = 0
    while data.startswith(b"ID3", start) and start + _ID3_HEADER_BYTES <= len(data):
        # Four bytes of seven bits state the size; bit 4 of the flags, a footer like the header.
        size = (
            data[start + 6] << 21 | data[start + 7] << 14 | data[start + 8] << 7 | data[start + 9]
        )
        footer = _ID3_HEADER_BYTES if data[start + 5] & 0x10 else 0
        start += _ID3_HEADER_BYTES + size + footer
    return data[start:]


def _has_known_signature(data: bytes) -> bool:
    is_mpeg_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    return is_mpeg_frame or data.startswith((b"RIFF", b"fLaC", b"OggS"))


def _read(data: bytes, conversion: AudioConversion) -> Recording:
    if not data:
        raise AudioError("empty_object", "the object has 0 bytes")
    content = without_id3(data)
    if not _has_known_signature(content):
        raise AudioError("not_audio", f"starts with {content[:4]!r}: need WAV, FLAC, OGG or MP3")
    if content.startswith(b"fLaC"):
        return _read_flac(content, conversion)
    if content.startswith((b"RIFF", b"OggS")):
        return _read_others(content, conversion)
    content, num_samples = counted_mp3(content)
    recording = _read_others(content, conversion)
    padding = padding_samples(recording.rate_hz)
    _require_samples(len(recording.samples) + padding, num_samples)
    return recording


def _read_flac(data: bytes, conversion: AudioConversion) -> Recording:
    try:
        info = stream_info(data)
    except ValueError as error:
        raise AudioError("not_audio", str(error)) from error
    conversion.require_accepted(info.sample_rate_hz, info.num_channels)
    _require_length(info.num_samples or _UNKNOWN_LENGTH, info.sample_rate_hz)
    try:
        samples = decode_flac(data, info).reshape(-1, info.num_channels)
    except ValueError as error:
        raise AudioError("truncated", str(error)) from error
    _require_samples(len(samples), info.num_samples)
    if len(samples) > info.num_samples:
        if (position := data.find(b"fLaC", 1)) > 0:
            raise AudioError("joined_files", f"another file begins at byte {position}")
        detail = f"more than the {info.num_samples} samples that the header says"
        raise AudioError("duration_mismatch", detail)
    return Recording(samples, info.sample_rate_hz)


def _read_others(data: bytes, conversion: AudioConversion) -> Recording:
    if data.startswith(b"RIFF"):
        require_one_wav(data)
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise AudioError("not_audio", error.error_string) from error
    with file:
        conversion.require_accepted(file.samplerate, file.channels)
        _require_length(file.frames, file.samplerate)
        _require_complete(data, file.frames, file.samplerate)
        try:
            samples = file.read(file.frames, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise AudioError("truncated", error.error_string) from error
        _require_samples(len(samples), file.frames)
        return Recording(np.asarray(samples, dtype=np.float32), file.samplerate)


def _require_length(num_samples: int, rate_hz: int) -> None:
    if num_samples == _UNKNOWN_LENGTH:
        detail = "the header does not state its length, as when written to a pipe: encode to a file"
        raise AudioError("unknown_length", detail)
    # Before anything is allocated: a header may claim 2**36 samples.
    if num_samples > MAX_DURATION_S * rate_hz:
        detail = f"the header says {num_samples} samples: need at most {MAX_DURATION_S} s"
        raise AudioError("too_long", detail)


def _require_complete(data: bytes, num_samples: int, rate_hz: int) -> None:
    if data.startswith(b"RIFF"):
        require_whole_wav(data, num_samples)
    if data.startswith(b"OggS"):
        shortfall = rate_hz // _OGG_SHORTFALLS_PER_S
        _require_samples(num_samples + shortfall, ogg_num_samples(data, rate_hz))


def _require_samples(num_samples: int, expected: int) -> None:
    if num_samples < expected:
        detail = f"decoded {num_samples} of the {expected} samples that the header says"
        raise AudioError("truncated", detail)


def _require_window(samples: Float32[np.ndarray, " samples"]) -> None:
    if len(samples) < WINDOW_SAMPLES:
        detail = f"{len(samples)} samples: need {WINDOW_SAMPLES}, one 25 ms window"
        raise AudioError("too_short", detail)


def _require_usable(samples: Float32[np.ndarray, " samples"]) -> None:
    if not len(samples):
        _require_window(samples)
    low, high = samples.min(), samples.max()
    if not (np.isfinite(low) and np.isfinite(high)):  # both are NaN if any sample is
        num_bad = len(samples) - np.isfinite(samples).sum()
        raise AudioError("non_finite", f"{num_bad} samples are NaN or infinite")
    if (peak := max(-low, high)) > MAX_PEAK:
        raise AudioError(
            "clipped", f"peak {peak:.1e}: need at most {MAX_PEAK:.0f}, full scale is 1"
        )
    _require_sound(samples)
    if peak >= _FULL_SCALE:
        _require_unclipped(samples)


def _require_sound(samples: Float32[np.ndarray, " samples"]) -> None:
    threshold = 10 ** (SILENCE_DBFS / 20)
    # The variance is at least a 16th of that of every 16th sample, which costs a 16th.
    part = samples[::16]
    deviations = part - np.add.reduce(part) / np.float32(len(part))  # std() takes thrice as long
    if np.vdot(deviations, deviations) >= len(part) * (4 * threshold) ** 2:
        return
    if (level := samples.std()) < threshold:
        raise AudioError("silent", f"RMS about the mean {level:.1e}: need {SILENCE_DBFS:.0f} dBFS")


def _require_unclipped(samples: Float32[np.ndarray, " samples"]) -> None:
    clipped_share = np.count_nonzero(np.abs(samples) >= _FULL_SCALE) / len(samples)
    if clipped_share > MAX_CLIPPED_SHARE:
        detail = f"{clipped_share:.1%} of the samples at full scale: need {MAX_CLIPPED_SHARE:.0%}"
        raise AudioError("clipped", detail)
