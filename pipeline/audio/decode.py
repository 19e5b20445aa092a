"""Decode audio to 16 kHz mono samples, or name the reason why not (paper 003 IV-B2).

The length is compared with the declared duration, as exactly as that is stated. A segment of a long
recording is cut out as a WAV of its own, so that it is decoded, checked and converted like an
object that holds nothing else. In a WAV its samples are a range of bytes. Other recordings are
decoded once, from the start, as a decoder that jumps into the middle may give other samples (of
MP3, by what earlier frames left).
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b

import numpy as np
from jaxtyping import Float32

from pipeline.audio.audio_file import AudioFile
from pipeline.audio.codecs import max_padding_samples, open_audio
from pipeline.audio.conversion import heard_channel, resample
from pipeline.audio.errors import AudioError
from pipeline.audio.wav import wav_file
from pipeline.filterbank import SAMPLE_RATE_HZ, WINDOW_SAMPLES, Engine
from pipeline.records import Segment
from pipeline.settings import NO_CONVERSION, AudioConversion

MAX_DURATION_ERROR_S = 1.0  # of other tools' lengths, and of recorders' rough figures
MAX_DURATION_ERROR_SHARE = 0.1
MAX_MISSING_SHARE = 0.25  # half an utterance never passes, however roughly its length is stated
MAX_SURPLUS_SHARE = 0.95  # nor do two of equal length for one, but 1.9 s cut to 1


def require_duration(
    samples: Float32[np.ndarray, " samples"], declared_s: float, padding_samples: int
) -> None:
    """Raise AudioError unless the samples last about as long as the metadata declares.

    Hours are budgeted, balanced and accounted as declared; a grossly wrong one falsifies all
    three, and is often another recording, or a part of the declared one.
    """
    decoded_s = len(samples) / SAMPLE_RATE_HZ
    missing_s, surplus_s = duration_tolerance(declared_s, padding_samples)
    if not -missing_s <= decoded_s - declared_s <= surplus_s:
        bounds = f"{declared_s - missing_s:.3f} to {declared_s + surplus_s:.3f} s"
        detail = f"{decoded_s:.3f} s of audio, declared {declared_s:.3f} s: need {bounds}"
        raise AudioError("duration_mismatch", detail)


def duration_tolerance(declared_s: float, padding_samples: int) -> tuple[float, float]:
    """Return the seconds that may be missing from `declared_s` and those that may be too many.

    Either is the larger of the metadata's precision and min(1 s, 10 %), plus the codec's padding.
    A rounded number is off by at most half the unit of its last digit; one whose digits were cut
    is too small, by less than the unit. At most a quarter may be missing, and 95 % surplus.
    """
    unit_s = _last_digit_s(declared_s)
    error_s = min(MAX_DURATION_ERROR_S, MAX_DURATION_ERROR_SHARE * declared_s)
    padding_s = padding_samples / SAMPLE_RATE_HZ
    missing_s = min(max(unit_s / 2, error_s) + padding_s, MAX_MISSING_SHARE * declared_s)
    surplus_s = min(max(unit_s, error_s) + padding_s, MAX_SURPLUS_SHARE * declared_s)
    return missing_s, surplus_s


def _last_digit_s(declared_s: float) -> float:
    # A float has lost its trailing zeros: 3.0 may be whole seconds, and is taken for them.
    exponent = Decimal(repr(declared_s)).normalize().as_tuple().exponent
    return 10.0 ** min(int(exponent), 0)


def is_rounded_from(declared_s: float, num_samples: int) -> bool:
    """Return whether `declared_s` is the length of `num_samples`, exact, rounded or cut."""
    unit_s, rounding_s = _last_digit_s(declared_s), 1 / SAMPLE_RATE_HZ
    surplus_s = num_samples / SAMPLE_RATE_HZ - declared_s
    return -unit_s / 2 - rounding_s <= surplus_s <= unit_s + rounding_s


MAX_DURATION_S = 3600
MAX_CLIPPED_SHARE = 0.01
MAX_PEAK = 4.0  # lossy decoders overshoot 1 a little; 1e30 would ruin its speaker's mean
SILENCE_DBFS = -90.0
MD5_ONE_IN: dict[Engine, int] = {"fast": 4, "kaldi": 1}
"""The share of FLACs whose MD5 is compared, by filter bank, so that it costs below 5 % of the step.

Comparing every one takes 11 % of a step with the fast filter bank.
"""

_MAX_SAMPLE_BYTES = 8  # a WAV of doubles
_MAX_METADATA_BYTES = 2**24  # the largest block of a FLAC, such as a picture
_FULL_SCALE = np.float32(32767 / 32768)


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
    file = open_audio(data, conversion)
    recorded = _read(file)
    samples = _converted(file, recorded, conversion)
    require_duration(samples, declared_s, file.padding_samples)
    is_doubtful = not is_rounded_from(declared_s, len(samples))
    id_hash = blake2b(utterance_id.encode(), digest_size=2).digest()
    is_sampled = int.from_bytes(id_hash, "big") % MD5_ONE_IN[engine] == 0
    if file.md5 and (is_doubtful or is_sampled):
        file.md5.require(recorded)
    is_plain = (file.rate_hz, file.num_channels) == (SAMPLE_RATE_HZ, 1)
    return Decoded(samples, None if is_plain else f"{file.rate_hz} Hz, {file.num_channels} ch")


def decode_audio(
    data: bytes, conversion: AudioConversion = NO_CONVERSION
) -> Float32[np.ndarray, " samples"]:
    """Decode a file of any of the codecs to 16 kHz mono samples in [-1, 1].

    Raises AudioError naming the reason, such as another rate than `conversion` accepts.
    """
    file = open_audio(data, conversion)
    return _converted(file, _read(file), conversion)


def max_file_bytes(declared_s: float, conversion: AudioConversion = NO_CONVERSION) -> int:
    """Bound the size of a file that `require_duration` may pass, in any of the containers."""
    rates_hz = (SAMPLE_RATE_HZ, *conversion.sample_rates_hz)
    _, surplus_s = duration_tolerance(declared_s, max(map(max_padding_samples, rates_hz)))
    num_samples = math.ceil((declared_s + surplus_s) * conversion.max_samples_per_s)
    return _MAX_METADATA_BYTES + num_samples * _MAX_SAMPLE_BYTES


def _read(file: AudioFile) -> Float32[np.ndarray, "samples channels"]:
    # Before anything is allocated: a header may claim 2**36 samples.
    if file.num_samples > MAX_DURATION_S * file.rate_hz:
        detail = f"the header says {file.num_samples} samples: need at most {MAX_DURATION_S} s"
        raise AudioError("too_long", detail)
    [samples] = file.cut([(0, file.num_samples)], compares_md5=False)
    return samples


def _converted(
    file: AudioFile, recorded: Float32[np.ndarray, "samples channels"], conversion: AudioConversion
) -> Float32[np.ndarray, " resampled"]:
    """Return 16 kHz mono samples; AudioError if they are of no use."""
    heard = heard_channel(conversion, recorded)
    # As recorded: a filter's overshoot is no clipping.
    if len(heard):
        _require_usable(heard)
        heard = resample(heard, file.rate_hz)
    if len(heard) < WINDOW_SAMPLES:
        detail = f"{len(heard)} samples: need {WINDOW_SAMPLES}, one 25 ms window"
        raise AudioError("too_short", detail)
    return heard


def _require_usable(samples: Float32[np.ndarray, " samples"]) -> None:
    low, high = samples.min(), samples.max()
    if not (np.isfinite(low) and np.isfinite(high)):  # both are NaN if any sample is
        num_bad = len(samples) - np.isfinite(samples).sum()
        raise AudioError("non_finite", f"{num_bad} samples are NaN or infinite")
    if (peak := max(-low, high)) > MAX_PEAK:
        detail = f"peak {peak:.1e}: need at most {MAX_PEAK:.0f}, full scale is 1"
        raise AudioError("clipped", detail)
    threshold = 10 ** (SILENCE_DBFS / 20)
    # The variance is at least a 16th of that of every 16th sample, which costs a 16th.
    part = samples[::16]
    deviations = part - np.add.reduce(part) / np.float32(len(part))  # std() takes thrice as long
    is_loud = np.vdot(deviations, deviations) >= len(part) * (4 * threshold) ** 2
    if not is_loud and (level := samples.std()) < threshold:
        raise AudioError("silent", f"RMS about the mean {level:.1e}: need {SILENCE_DBFS:.0f} dBFS")
    if peak < _FULL_SCALE:
        return
    clipped_share = np.count_nonzero(np.abs(samples) >= _FULL_SCALE) / len(samples)
    if clipped_share > MAX_CLIPPED_SHARE:
        detail = f"{clipped_share:.1%} of the samples at full scale: need {MAX_CLIPPED_SHARE:.0%}"
        raise AudioError("clipped", detail)


HEAD_BYTES = 2**16
"""Nearly all WAVs have their header within the first 64 KB."""

MAX_OVERSHOOT_S = 0.5
"""A segment may end this far past the recording's end, as in Kaldi's extract-segments."""

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
    samples = iter(file.cut(wanted) if wanted else ())
    width = 4 * file.num_channels
    byte_rate = file.rate_hz * width
    form = struct.pack("<HHIIHH", _FLOAT, file.num_channels, file.rate_hz, byte_rate, width, 32)
    return [
        cut if isinstance(cut, AudioError) else wav_file(form, next(samples).tobytes())
        for cut in cuts
    ]
