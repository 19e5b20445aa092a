"""Audio of other rates and of several channels becomes 16 kHz mono, where that is asked for."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import fftconvolve, firwin, kaiserord

from pipeline.audio.conversion import STOP_BAND_DB, TRANSITION_SHARE, low_pass, resample
from pipeline.audio.decode import AudioError, decode_audio, decode_utterance, max_file_bytes
from pipeline.settings import RATES_HZ, AudioConversion
from tests import small_corpus

ANY_RATE = AudioConversion(RATES_HZ)
SECONDS = 2.0


def tone(frequency_hz: float, rate_hz: int, seconds: float = SECONDS) -> np.ndarray:
    times_s = np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.5 * np.sin(2 * np.pi * frequency_hz * times_s)).astype(np.float32)


def encode(samples: np.ndarray, rate_hz: int, container: str = "WAV", subtype: str = "") -> bytes:
    return small_corpus.encode(samples, container, subtype or None, rate_hz)


def middle(samples: np.ndarray) -> np.ndarray:
    """Leave out an eighth at each end, where the filter meets silence."""
    edge = len(samples) // 8
    return samples[edge:-edge]


def decibels(samples: np.ndarray) -> float:
    return 20 * np.log10(np.sqrt(np.mean(middle(samples) ** 2)) / (0.5 / np.sqrt(2)))


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_the_pass_band_is_kept_without_delay(rate_hz: int) -> None:
    """A tone below 0.85 of the lower rate's half keeps amplitude and phase to 1e-2."""
    frequency_hz = 0.84 * min(rate_hz, 16_000) / 2
    found = resample(tone(frequency_hz, rate_hz), rate_hz)
    expected = tone(frequency_hz, 16_000)
    assert len(found) == len(expected)
    np.testing.assert_allclose(middle(found), middle(expected), atol=0.5 * 1e-2)


@pytest.mark.parametrize("rate_hz", [each for each in RATES_HZ if each > 16_000])
def test_what_would_alias_is_attenuated(rate_hz: int) -> None:
    """A tone from 8 kHz on is 60 dB lower; one in the middle of the pass band is not."""
    for frequency_hz in (8_000.0, 0.49 * rate_hz):
        assert decibels(resample(tone(frequency_hz, rate_hz), rate_hz)) < -STOP_BAND_DB + 1
    assert abs(decibels(resample(tone(3_400.0, rate_hz), rate_hz))) < 0.02


@pytest.mark.parametrize("rate_hz", [each for each in RATES_HZ if each < 16_000])
def test_upsampling_invents_nothing_above_the_old_half(rate_hz: int) -> None:
    """The image of a tone lies 60 dB below it."""
    frequency_hz = 0.42 * rate_hz
    found = resample(tone(frequency_hz, rate_hz), rate_hz)
    spectrum = np.abs(np.fft.rfft(middle(found) * np.hanning(len(middle(found)))))
    bins_hz = np.fft.rfftfreq(len(middle(found)), 1 / 16_000)
    images = spectrum[bins_hz > rate_hz / 2].max()
    assert 20 * np.log10(images / spectrum.max()) < -STOP_BAND_DB + 1


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 44_100])
def test_the_filter_is_the_stated_one(rate_hz: int) -> None:
    """Zeros between the samples, the low-pass at the common rate in float64, every n-th value."""
    ratio = Fraction(16_000, rate_hz)
    common_hz = rate_hz * ratio.numerator
    half_hz = min(rate_hz, 16_000) / 2
    width_hz = TRANSITION_SHARE * half_hz
    num_taps, beta = kaiserord(STOP_BAND_DB, width_hz / (common_hz / 2))
    taps = firwin(num_taps | 1, half_hz - width_hz / 2, window=("kaiser", beta), fs=common_hz)
    samples = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    up = np.zeros(len(samples) * ratio.numerator)
    up[:: ratio.numerator] = samples
    whole = fftconvolve(up, taps * ratio.numerator)[len(taps) // 2 :]
    found = resample(samples, rate_hz)
    expected = whole[:: ratio.denominator][: len(found)]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert len(low_pass(rate_hz)) % 2 == 1


@given(st.sampled_from(RATES_HZ), st.integers(1, 5_000))
def test_the_length_is_that_of_the_same_seconds(rate_hz: int, num_samples: int) -> None:
    """It is rounded up."""
    expected = -(-num_samples * 16_000 // rate_hz)
    assert len(resample(np.zeros(num_samples, np.float32), rate_hz)) == expected


def test_16_khz_is_left_as_it_is() -> None:
    """The same array, so the bytes of existing corpora stay."""
    samples = tone(440, 16_000)
    assert resample(samples, 16_000) is samples


@pytest.mark.parametrize(
    ("container", "subtype"),
    [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")],
)
@pytest.mark.parametrize("rate_hz", [8_000, 44_100])
def test_every_container_is_resampled(container: str, subtype: str, rate_hz: int) -> None:
    """Its tone comes out at 16 kHz, and the form says what it was."""
    data = encode(tone(1_000, rate_hz), rate_hz, container, subtype)
    decoded = decode_utterance(data, "u", SECONDS, conversion=ANY_RATE)
    assert decoded.audio_form == f"{rate_hz} Hz, 1 ch"
    assert abs(len(decoded.samples) - 32_000) <= 4 * 1152 * 16_000 / rate_hz
    spectrum = np.abs(np.fft.rfft(middle(decoded.samples)))
    peak_hz = spectrum.argmax() * 16_000 / len(middle(decoded.samples))
    assert peak_hz == pytest.approx(1_000, abs=2)
    assert abs(decibels(decoded.samples)) < 0.5


@pytest.mark.parametrize("rate_hz", [8_000, 12_000, 24_000, 48_000])
def test_opus_is_counted_at_its_own_rate(rate_hz: int) -> None:
    """Its granules count at 48 kHz, whatever the rate."""
    data = encode(tone(1_000, rate_hz), rate_hz, "OGG", "OPUS")
    assert len(decode_audio(data, ANY_RATE)) == pytest.approx(32_000, abs=1_600)


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG"])
@pytest.mark.parametrize("channel", ["0", "1", "mean"])
def test_a_channel_is_heard(container: str, channel: str) -> None:
    """One by its number, or the mean of all; the form states their number."""
    left, right = tone(500, 16_000), 0.25 * tone(2_000, 16_000)
    data = encode(np.stack([left, right], axis=1), 16_000, container)
    decoded = decode_utterance(data, "u", SECONDS, conversion=AudioConversion((), channel))
    expected = {"0": left, "1": right, "mean": (left + right) / 2}[channel]
    tolerance = 0.02 if container == "OGG" else 2**-15
    np.testing.assert_allclose(middle(decoded.samples), middle(expected), atol=tolerance)
    assert decoded.audio_form == "16000 Hz, 2 ch"


def test_a_damaged_stereo_flac_is_found_by_its_md5() -> None:
    """The sum is of all channels at the file's own rate, before anything is converted."""
    stereo = np.stack([tone(500, 44_100), tone(900, 44_100)], axis=1)
    data = encode(stereo, 44_100, "FLAC", "PCM_16")
    conversion = AudioConversion((44_100,), "mean")
    for name in ("a", "b", "c", "d", "e", "f", "g", "h"):
        decode_utterance(data, name, SECONDS, conversion=conversion)
    flipped = data[:26] + bytes([data[26] ^ 1]) + data[27:]
    # A length that nothing rounds to is doubtful, so that the sum is compared.
    with pytest.raises(AudioError, match="checksum_mismatch"):
        decode_utterance(flipped, "a", 1.987, conversion=conversion)


@pytest.mark.parametrize(
    ("rate_hz", "num_channels", "conversion", "message"),
    [
        (8_000, 1, AudioConversion(), "8000 Hz: need 16000.*sample_rates_hz: 8000"),
        (8_000, 1, AudioConversion((44_100,)), "8000 Hz: need 16000"),
        (37_800, 1, ANY_RATE, "37800 Hz: need 16000; resample before ingestion$"),
        (16_000, 2, ANY_RATE, '2 channels: need 1, or set .*channel to "mean"'),
        (16_000, 2, AudioConversion((), "2"), "2 channels: need channel 2"),
        (16_000, 9, AudioConversion((), "mean"), "9 channels: need at most 8"),
    ],
)
@pytest.mark.parametrize("container", ["WAV", "FLAC"])
def test_what_is_not_asked_for_is_refused(
    container: str, rate_hz: int, num_channels: int, conversion: AudioConversion, message: str
) -> None:
    """With the rate or the channels, and the setting that would accept them."""
    if num_channels > 8:  # as many as a FLAC may have
        container = "WAV"
    samples = np.repeat(tone(440, rate_hz)[:, None], num_channels, axis=1)
    with pytest.raises(AudioError, match=message):
        decode_audio(encode(samples, rate_hz, container, "PCM_16"), conversion)


@pytest.mark.parametrize(
    ("rates_hz", "channel", "message"),
    [
        ((9_000,), "only", "9000: need some of 8000, 11025"),
        ((96_000,), "only", "96000: need 8000..48000"),
        ((), "8", "channel = '8': need .*such as \"?'?mean"),
        ((), "left", "channel = 'left': need"),
    ],
)
def test_settings_are_checked(rates_hz: tuple[int, ...], channel: str, message: str) -> None:
    """Rates are of the known ones, channels numbers below 8, "mean" or "only"."""
    with pytest.raises(ValueError, match=message):
        AudioConversion(rates_hz, channel)


def test_clipping_is_judged_before_the_filter() -> None:
    """A square wave at full scale is refused, whatever the filter's overshoot makes of it."""
    square = np.sign(tone(100, 44_100)).astype(np.float32) * np.float32(32767 / 32768)
    with pytest.raises(AudioError, match="clipped"):
        decode_audio(encode(square, 44_100, "WAV", "FLOAT"), ANY_RATE)
    loud = np.float32(0.99) * np.sign(tone(100, 44_100)).astype(np.float32)
    assert np.abs(decode_audio(encode(loud, 44_100, "WAV", "FLOAT"), ANY_RATE)).max() > 1


def test_files_may_be_larger_where_more_is_accepted() -> None:
    """An hour of doubles at 48 kHz in 8 channels has 48 times the bytes of 16 kHz mono floats."""
    assert max_file_bytes(3600.0, AudioConversion((48_000,), "mean")) >= 3600 * 48_000 * 8 * 8
    assert max_file_bytes(3600.0) < 2**24 + 3602 * 16_000 * 8
