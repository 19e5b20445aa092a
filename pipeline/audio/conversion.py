"""Convert audio of other rates and of several channels to 16 kHz mono, where a recipe allows it."""

from fractions import Fraction
from functools import lru_cache

import numpy as np
from jaxtyping import Float32

from pipeline.audio.errors import AudioError
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.settings import MAX_CHANNELS, RATES_HZ, AudioConversion

STOP_BAND_DB = 60.0
"""The attenuation beyond half of the lower rate, of what would alias or be an image."""

TRANSITION_SHARE = 0.15
"""The pass band ends at 0.85 of the lower rate's half: 6.8 kHz of 16 kHz audio."""


def require_accepted(conversion: AudioConversion, rate_hz: int, num_channels: int) -> None:
    """Raise AudioError for a rate or a number of channels that is not asked for."""
    if rate_hz != SAMPLE_RATE_HZ and rate_hz not in conversion.sample_rates_hz:
        need = f"need {SAMPLE_RATE_HZ}; resample before ingestion"
        if rate_hz in RATES_HZ:
            need += f", or add it to features.conversion.sample_rates_hz: {rate_hz}"
        raise AudioError("wrong_sample_rate", f"{rate_hz} Hz: {need}")
    if num_channels > MAX_CHANNELS:
        remedy = "write the channel that is to be heard to a file of its own before ingestion"
        raise AudioError(
            "not_mono", f"{num_channels} channels: need at most {MAX_CHANNELS}: {remedy}"
        )
    if conversion.channel == "only" and num_channels != 1:
        remedy = 'or set features.conversion.channel to "mean" or a number'
        raise AudioError("not_mono", f"{num_channels} channels: need 1, {remedy}")
    if conversion.channel.isdigit() and int(conversion.channel) >= num_channels:
        raise AudioError("not_mono", f"{num_channels} channels: need channel {conversion.channel}")


def heard_channel(
    conversion: AudioConversion, samples: Float32[np.ndarray, "samples channels"]
) -> Float32[np.ndarray, " samples"]:
    """Return the chosen channel, or the mean of all."""
    if samples.shape[1] == 1:
        return samples[:, 0]
    if conversion.channel == "mean":
        return np.asarray(samples.mean(axis=1, dtype=np.float32))
    return np.ascontiguousarray(samples[:, int(conversion.channel)])


def resample(
    samples: Float32[np.ndarray, " samples"], rate_hz: int
) -> Float32[np.ndarray, " resampled"]:
    """Resample to 16 kHz by a symmetric polyphase filter, which delays nothing."""
    if rate_hz == SAMPLE_RATE_HZ:
        return samples
    # Here, as recipes have this record and scipy.signal takes a second to import.
    from scipy.signal import resample_poly  # noqa: PLC0415

    ratio = Fraction(SAMPLE_RATE_HZ, rate_hz)
    up, down = ratio.numerator, ratio.denominator
    resampled = resample_poly(samples, up, down, window=low_pass(rate_hz))
    return np.asarray(resampled, dtype=np.float32)


@lru_cache
def low_pass(rate_hz: int) -> Float32[np.ndarray, " taps"]:
    """Design the Kaiser-windowed low-pass filter at the least common multiple of both rates."""
    from scipy.signal import firwin, kaiserord  # noqa: PLC0415

    common_hz = rate_hz * Fraction(SAMPLE_RATE_HZ, rate_hz).numerator
    stop_hz = min(rate_hz, SAMPLE_RATE_HZ) / 2
    width_hz = TRANSITION_SHARE * stop_hz
    num_taps, beta = kaiserord(STOP_BAND_DB, width_hz / (common_hz / 2))
    # An odd number has its centre on a sample.
    taps = firwin(num_taps | 1, stop_hz - width_hz / 2, window=("kaiser", beta), fs=common_hz)
    return np.asarray(taps, dtype=np.float32)
