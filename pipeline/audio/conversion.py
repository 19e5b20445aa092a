"""Convert audio of other rates and of several channels to 16 kHz mono, where a recipe allows it."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated

import numpy as np
from jaxtyping import Float32

from infra.settings import Items, Range, Text, check_ranges
from pipeline.audio.errors import AudioError
from pipeline.filterbank import SAMPLE_RATE_HZ

RATES_HZ = (8_000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000)
MAX_CHANNELS = 8  # of a FLAC

STOP_BAND_DB = 60.0
"""The attenuation beyond half of the lower rate, of what would alias or be an image."""

TRANSITION_SHARE = 0.15
"""The pass band ends at 0.85 of the lower rate's half: 6.8 kHz of 16 kHz audio."""


@dataclass(frozen=True, slots=True)
class AudioConversion:
    """AudioConversion: rates that are resampled to 16 kHz, and the channel that is heard.

    `channel` is "only", for files of one channel, "mean", or a channel's number from "0" on.
    """

    sample_rates_hz: Annotated[
        tuple[Annotated[int, Range(RATES_HZ[0], RATES_HZ[-1])], ...], Items(0, len(RATES_HZ))
    ] = ()
    channel: Annotated[str, Text(1, 4, r"only|mean|[0-7]", "mean")] = "only"

    def __post_init__(self) -> None:
        check_ranges(self)
        for rate_hz in self.sample_rates_hz:
            if rate_hz not in RATES_HZ:
                raise ValueError(
                    f"sample_rates_hz: {rate_hz}: need some of {', '.join(map(str, RATES_HZ))}"
                )

    @property
    def max_samples_per_s(self) -> int:
        """Return the most samples of all channels in a second of audio that is accepted."""
        channels = 1 if self.channel == "only" else MAX_CHANNELS
        return channels * max(SAMPLE_RATE_HZ, *self.sample_rates_hz, 0)

    def require_accepted(self, rate_hz: int, num_channels: int) -> None:
        """Raise AudioError for a rate or a number of channels that is not asked for."""
        if rate_hz != SAMPLE_RATE_HZ and rate_hz not in self.sample_rates_hz:
            need = f"need {SAMPLE_RATE_HZ}; resample before ingestion"
            if rate_hz in RATES_HZ:
                need += f", or add it to features.conversion.sample_rates_hz: {rate_hz}"
            raise AudioError("wrong_sample_rate", f"{rate_hz} Hz: {need}")
        if self.channel == "only" and num_channels != 1:
            remedy = 'or set features.conversion.channel to "mean" or a number'
            raise AudioError("not_mono", f"{num_channels} channels: need 1, {remedy}")
        if self.channel.isdigit() and int(self.channel) >= num_channels:
            raise AudioError("not_mono", f"{num_channels} channels: need channel {self.channel}")

    def heard_channel(
        self, samples: Float32[np.ndarray, "samples channels"]
    ) -> Float32[np.ndarray, " samples"]:
        """Return the chosen channel, or the mean of all."""
        if samples.shape[1] == 1:
            return samples[:, 0]
        if self.channel == "mean":
            return np.asarray(samples.mean(axis=1, dtype=np.float32))
        return np.ascontiguousarray(samples[:, int(self.channel)])


NO_CONVERSION = AudioConversion()
ANY_AUDIO = AudioConversion(RATES_HZ, "0")
"""It accepts whatever another conversion may have accepted."""


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
