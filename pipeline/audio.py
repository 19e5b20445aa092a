"""Bytes to 16 kHz mono samples, or a named reason why not (paper 003 IV-B2)."""

import io
from typing import Literal

import numpy as np
import soundfile
from jaxtyping import Float32

from pipeline.audio_container import ogg_num_samples, riff_shortfall
from pipeline.filterbank import SAMPLE_RATE_HZ, WINDOW_SAMPLES

MAX_DURATION_S = 3600
MAX_CLIPPED_SHARE = 0.01
MAX_PEAK = 4.0  # lossy decoders overshoot 1 a little; 1e30 would ruin its speaker's mean
SILENCE_DBFS = -90.0
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
    "silent",
    "non_finite",
    "clipped",
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


def _has_known_signature(data: bytes) -> bool:
    is_mpeg_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    return is_mpeg_frame or data.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3"))


def _read_samples(data: bytes) -> Float32[np.ndarray, " samples"]:
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise AudioError("not_audio", error.error_string) from error
    with file:
        _require_format(file)
        _require_complete(data, file.frames)
        try:
            samples = file.read(file.frames, dtype="float32")
        except soundfile.LibsndfileError as error:
            raise AudioError("truncated", error.error_string) from error
        _require_samples(len(samples), file.frames)
    return np.asarray(samples, dtype=np.float32)


def _require_format(file: soundfile.SoundFile) -> None:
    if file.samplerate != SAMPLE_RATE_HZ:
        detail = f"{file.samplerate} Hz: need {SAMPLE_RATE_HZ}; resample before ingestion"
        raise AudioError("wrong_sample_rate", detail)
    if file.channels != 1:
        raise AudioError("not_mono", f"{file.channels} channels: need 1")
    # Before anything is allocated: a header may claim 2**63 samples, or not know.
    if file.frames > MAX_DURATION_S * SAMPLE_RATE_HZ:
        detail = f"the header says {file.frames} samples: need at most {MAX_DURATION_S} s"
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
    if not np.isfinite(samples).all():
        num_bad = len(samples) - np.isfinite(samples).sum()
        raise AudioError("non_finite", f"{num_bad} samples are NaN or infinite")
    magnitudes = np.abs(samples)
    if (peak := magnitudes.max()) > MAX_PEAK:
        raise AudioError(
            "clipped", f"peak {peak:.1e}: need at most {MAX_PEAK:.0f}, full scale is 1"
        )
    if (level := samples.std()) < 10 ** (SILENCE_DBFS / 20):
        raise AudioError("silent", f"RMS about the mean {level:.1e}: need {SILENCE_DBFS:.0f} dBFS")
    clipped_share = np.count_nonzero(magnitudes >= _FULL_SCALE) / len(samples)
    if clipped_share > MAX_CLIPPED_SHARE:
        detail = f"{clipped_share:.1%} of the samples at full scale: need {MAX_CLIPPED_SHARE:.0%}"
        raise AudioError("clipped", detail)
