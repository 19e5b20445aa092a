"""Bytes to 16 kHz mono samples, or a named reason why not (paper 003 IV-B2)."""

import io
import math
from typing import Literal

import numpy as np
import soundfile
from jaxtyping import Float32

from pipeline.audio.container import ogg_num_samples, riff_shortfall
from pipeline.audio.flac import decode_flac, stream_info
from pipeline.filterbank import SAMPLE_RATE_HZ, WINDOW_SAMPLES

MAX_DURATION_S = 3600
MAX_CLIPPED_SHARE = 0.01
MAX_PEAK = 4.0  # lossy decoders overshoot 1 a little; 1e30 would ruin its speaker's mean
SILENCE_DBFS = -90.0
MAX_DURATION_ERROR_S = 1.0  # rounding to seconds, and the padding of lossy codecs
MAX_DURATION_ERROR_SHARE = 0.1
_MAX_SAMPLE_BYTES = 8  # a WAV of doubles
_MAX_METADATA_BYTES = 2**24  # the largest block of a FLAC, such as a picture
_UNKNOWN_LENGTH = 2**63 - 1  # libsndfile's word for a FLAC that was written to a pipe
_FULL_SCALE = np.float32(32767 / 32768)
_MAX_OGG_SHORTFALL = SAMPLE_RATE_HZ // 8  # Opus's pre-skip is below 0.1 s

AudioReason = Literal[
    "empty_object",
    "not_audio",
    "truncated",
    "wrong_sample_rate",
    "not_mono",
    "too_short",
    "too_long",
    "unknown_length",
    "silent",
    "non_finite",
    "clipped",
    "duration_mismatch",
]


class AudioError(ValueError):
    """Audio that cannot be used; `reason` is its name in the quarantine ledger."""

    def __init__(self, reason: AudioReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def decode_audio(data: bytes) -> Float32[np.ndarray, " samples"]:
    """Decode a WAV, FLAC, OGG (Vorbis, Opus) or MP3 file to 16 kHz mono samples in [-1, 1].

    Raises AudioError naming the reason.
    """
    if not data:
        raise AudioError("empty_object", "the object has 0 bytes")
    if not _has_known_signature(data):
        raise AudioError("not_audio", f"starts with {data[:4]!r}: need WAV, FLAC, OGG or MP3")
    samples = _read_samples(data)
    _require_usable(samples)
    return samples


def max_file_bytes(declared_s: float) -> int:
    """Bound the size of a file that `require_duration` may pass, in any of the containers."""
    longest_s = declared_s + max(MAX_DURATION_ERROR_S, MAX_DURATION_ERROR_SHARE * declared_s)
    return _MAX_METADATA_BYTES + math.ceil(longest_s * SAMPLE_RATE_HZ) * _MAX_SAMPLE_BYTES


def require_duration(samples: Float32[np.ndarray, " samples"], declared_s: float) -> None:
    """Raise AudioError unless the samples last about as long as the metadata declares.

    Hours are budgeted, balanced and accounted as declared; a grossly wrong one falsifies all
    three, and is often another recording, or the first of several streams in one file.
    """
    decoded_s = len(samples) / SAMPLE_RATE_HZ
    bound_s = max(MAX_DURATION_ERROR_S, MAX_DURATION_ERROR_SHARE * declared_s)
    if abs(decoded_s - declared_s) > bound_s:
        detail = (
            f"{decoded_s:.3f} s of audio, declared {declared_s:.3f} s: need within {bound_s:g} s"
        )
        raise AudioError("duration_mismatch", detail)


def _has_known_signature(data: bytes) -> bool:
    is_mpeg_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    return is_mpeg_frame or data.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3"))


def _read_samples(data: bytes) -> Float32[np.ndarray, " samples"]:
    return _read_flac(data) if data.startswith(b"fLaC") else _read_others(data)


def _read_flac(data: bytes) -> Float32[np.ndarray, " samples"]:
    try:
        info = stream_info(data)
    except ValueError as error:
        raise AudioError("not_audio", str(error)) from error
    _require_format(info.sample_rate_hz, info.num_channels, info.num_samples or _UNKNOWN_LENGTH)
    try:
        samples = decode_flac(data, info)
    except ValueError as error:
        raise AudioError("truncated", str(error)) from error
    _require_samples(len(samples), info.num_samples)
    if len(samples) > info.num_samples:
        detail = f"more than the {info.num_samples} samples that the header says"
        raise AudioError("duration_mismatch", detail)
    return samples


def _read_others(data: bytes) -> Float32[np.ndarray, " samples"]:
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise AudioError("not_audio", error.error_string) from error
    with file:
        _require_format(file.samplerate, file.channels, file.frames)
        _require_complete(data, file.frames)
        try:
            samples = file.read(file.frames, dtype="float32")
        except soundfile.LibsndfileError as error:
            raise AudioError("truncated", error.error_string) from error
        _require_samples(len(samples), file.frames)
    return np.asarray(samples, dtype=np.float32)


def _require_format(sample_rate_hz: int, num_channels: int, num_samples: int) -> None:
    if sample_rate_hz != SAMPLE_RATE_HZ:
        detail = f"{sample_rate_hz} Hz: need {SAMPLE_RATE_HZ}; resample before ingestion"
        raise AudioError("wrong_sample_rate", detail)
    if num_channels != 1:
        raise AudioError("not_mono", f"{num_channels} channels: need 1")
    if num_samples == _UNKNOWN_LENGTH:
        detail = "the header does not state its length, as when written to a pipe: encode to a file"
        raise AudioError("unknown_length", detail)
    # Before anything is allocated: a header may claim 2**36 samples.
    if num_samples > MAX_DURATION_S * SAMPLE_RATE_HZ:
        detail = f"the header says {num_samples} samples: need at most {MAX_DURATION_S} s"
        raise AudioError("too_long", detail)


def _require_complete(data: bytes, num_samples: int) -> None:
    if data.startswith(b"RIFF") and (shortfall := riff_shortfall(data)):
        raise AudioError("truncated", f"{shortfall} bytes fewer than the header says")
    if data.startswith(b"OggS"):
        try:
            expected = ogg_num_samples(data)
        except ValueError as error:
            raise AudioError("truncated", str(error)) from error
        _require_samples(num_samples + _MAX_OGG_SHORTFALL, expected)


def _require_samples(num_samples: int, expected: int) -> None:
    if num_samples < expected:
        detail = f"decoded {num_samples} of the {expected} samples that the header says"
        raise AudioError("truncated", detail)


def _require_usable(samples: Float32[np.ndarray, " samples"]) -> None:
    if len(samples) < WINDOW_SAMPLES:
        detail = f"{len(samples)} samples: need {WINDOW_SAMPLES}, one 25 ms window"
        raise AudioError("too_short", detail)
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
