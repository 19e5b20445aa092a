import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from pipeline.audio.audio_file import reader_of
from pipeline.audio.codecs import stated_duration_s
from pipeline.audio.decode import (
    AudioError,
    decode_audio,
    decode_utterance,
)

FORMATS = [
    ("WAV", "PCM_16"),
    ("WAV", "FLOAT"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
]


def noise(num_samples: int = 32000, scale: float = 0.1) -> np.ndarray:
    generator = np.random.default_rng(0)
    return (generator.standard_normal(num_samples) * scale).astype(np.float32)


def encode(
    samples: np.ndarray, container: str = "WAV", subtype: str = "PCM_16", rate_hz: int = 16000
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=container, subtype=subtype)
    return file.getvalue()


def stated(data: bytes) -> float | None:
    return stated_duration_s(reader_of(data), len(data))


def reason(data: bytes) -> str:
    with pytest.raises(AudioError) as caught:
        decode_audio(data)
    assert caught.value.detail
    assert str(caught.value).startswith(caught.value.reason)
    return caught.value.reason


@pytest.mark.parametrize(("container", "subtype"), FORMATS)
def test_every_container_gives_all_its_samples(container: str, subtype: str) -> None:
    """Two seconds go in, two seconds of float32 come out."""
    samples = decode_audio(encode(noise(), container, subtype))
    assert samples.shape == (32000,)
    assert samples.dtype == np.float32


@pytest.mark.parametrize(("container", "subtype"), [("WAV", "PCM_16"), ("FLAC", "PCM_16")])
def test_lossless_containers_keep_the_samples(container: str, subtype: str) -> None:
    """16-bit samples come back exactly."""
    pcm = (noise() * 32768).round() / 32768
    assert (decode_audio(encode(pcm, container, subtype)) == pcm).all()


@pytest.mark.parametrize(("container", "subtype"), FORMATS)
@pytest.mark.parametrize("keep", [0.5, 0.9, 0.99])
def test_a_cut_file_is_not_taken_for_a_short_one(container: str, subtype: str, keep: float) -> None:
    """The header knows better: libsndfile alone shortens WAV, OGG and MP3 silently."""
    data = encode(noise(), container, subtype)
    assert reason(data[: int(len(data) * keep)]) in {"truncated", "not_audio"}


@pytest.mark.parametrize(("container", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS")])
def test_bytes_damaged_in_the_middle_lose_frames(container: str, subtype: str) -> None:
    """A decoder that skips or stops is noticed."""
    data = bytearray(encode(noise(), container, subtype))
    middle = len(data) // 2
    data[middle : middle + 50] = bytes(byte ^ 0x5A for byte in data[middle : middle + 50])
    assert reason(bytes(data)) == "truncated"


def test_a_header_that_claims_a_year_allocates_nothing() -> None:
    """FLAC's 36-bit sample count at its limit is refused before decoding."""
    data = bytearray(encode(noise(), "FLAC"))
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    assert reason(bytes(data)) == "too_long"


def test_a_wav_of_open_length_is_whole() -> None:
    """A stream written to a pipe states 2^32 - 1 bytes."""
    data = bytearray(encode(noise()))
    data[4:8] = data[40:44] = b"\xff" * 4
    assert len(decode_audio(bytes(data))) == 32000


def with_sample(value: float) -> np.ndarray:
    samples = noise()
    samples[100] = value
    return samples


CASES: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "empty_object"),
    "text": (b"<html>404 Not Found</html>", "not_audio"),
    "only a signature": (b"fLaC", "not_audio"),
    "44.1 kHz stereo": (encode(noise(88200).reshape(-1, 2), rate_hz=44100), "wrong_sample_rate"),
    "8 kHz": (encode(noise(), rate_hz=8000), "wrong_sample_rate"),
    "16 kHz stereo": (encode(noise().reshape(-1, 2)), "not_mono"),
    "no samples": (encode(noise(0)), "too_short"),
    "399 samples": (encode(noise(399)), "too_short"),
    "zeros": (encode(np.zeros(16000)), "silent"),
    "direct current": (encode(np.full(16000, 0.5)), "silent"),
    "the last bit": (encode(np.tile([0, 2**-15], 8000)), "silent"),
    "NaN": (encode(with_sample(np.nan), subtype="FLOAT"), "non_finite"),
    "infinity": (encode(with_sample(np.inf), subtype="FLOAT"), "non_finite"),
    "one absurd sample": (encode(with_sample(1e30), subtype="FLOAT"), "clipped"),
    "16-bit units": (encode(noise() * 32768, subtype="FLOAT"), "clipped"),
    "overdriven": (encode(np.clip(noise() * 20, -1, 1)), "clipped"),
}


@pytest.mark.parametrize("case", CASES)
def test_unusable_audio_has_a_named_reason(case: str) -> None:
    """Each kind of bad audio lands in the ledger under its own name."""
    data, expected = CASES[case]
    assert reason(data) == expected


def test_more_than_an_hour_is_too_long() -> None:
    """A few kilobytes of FLAC can unpack to more than an hour."""
    assert reason(encode(np.zeros(3600 * 16000 + 1, np.int16), "FLAC")) == "too_long"


@pytest.mark.parametrize("loudest", [0.5, 0.9999])
def test_loud_is_not_clipped(loudest: float) -> None:
    """Up to one sample in a hundred may touch full scale."""
    samples = noise(scale=0.1)
    samples[::200] = loudest
    assert len(decode_audio(encode(samples))) == 32000


@given(st.binary(max_size=300), st.sampled_from([b"", b"RIFF", b"fLaC", b"OggS", b"ID3"]))
def test_arbitrary_bytes_never_escape_as_another_error(tail: bytes, signature: bytes) -> None:
    """Whatever the bytes: samples or an AudioError."""
    with pytest.raises(AudioError):
        decode_audio(signature + tail)


def test_real_recordings_pass(an4_dir: Path) -> None:
    """AN4's audio decodes; its durations are those of the files' headers."""
    for path in sorted(an4_dir.glob("audio/*/*.flac"))[:40]:
        assert len(decode_audio(path.read_bytes())) == soundfile.info(path).frames


PADDING = {"WAV": 0, "FLAC": 0, "VORBIS": 0, "OPUS": 1_600, "MPEG_LAYER_III": 2_304}


@pytest.mark.parametrize(("container", "subtype"), FORMATS)
def test_a_codec_may_add_its_padding(container: str, subtype: str) -> None:
    """Declared as 2.7 s, 10 % more may be decoded and the codec's padding, and no sample more."""
    longest = round(1.1 * 2.7 * 16_000) + PADDING.get(subtype, 0)
    decode_utterance(encode(noise(longest), container, subtype), "utt", 2.7)
    with pytest.raises(AudioError, match="duration_mismatch"):
        decode_utterance(encode(noise(longest + 2), container, subtype), "utt", 2.7)


def id3(content: bytes, flags: int = 0) -> bytes:
    size = bytes(len(content) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\4\0" + bytes([flags]) + size + content


@pytest.mark.parametrize("container", ["FLAC", "MP3", "WAV"])
def test_tags_before_the_audio_are_skipped(container: str) -> None:
    """One or two, of more than 127 bytes, one with a footer, and zeros behind one."""
    subtype = "MPEG_LAYER_III" if container == "MP3" else "PCM_16"
    data = encode(noise(), container, subtype)
    samples = decode_audio(data)
    for tags in (
        id3(bytes(300)),
        id3(b"one") + id3(b""),
        id3(bytes(20), flags=0x10) + bytes(10),
        id3(b"one") + bytes(700),
    ):
        np.testing.assert_array_equal(decode_audio(tags + data), samples)
        assert stated(tags + data) == 2.0


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100])
def test_a_file_states_its_length_at_any_rate(rate_hz: int) -> None:
    """Without decoding; what is no audio, or was written to a pipe, states none."""
    for container, subtype in FORMATS:
        if (subtype, rate_hz) != ("OPUS", 44_100):
            data = encode(noise(2 * rate_hz), container, subtype, rate_hz)
            assert stated(data) == pytest.approx(2.0, abs=0.001)
    flac = encode(noise(), "FLAC")
    assert stated(flac[:22] + bytes(4) + flac[26:]) is None
    assert stated(b"not audio") is None
    assert stated(b"\xff\xfbgarbage") is None
