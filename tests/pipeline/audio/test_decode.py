import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.audio.audio_file import reader_of
from pipeline.audio.codecs import stated_duration_s
from pipeline.audio.decode import AudioError, decode_audio, decode_utterance
from tests.small_corpus import encode

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


def stated(data: bytes) -> float | None:
    return stated_duration_s(reader_of(data), len(data))


def test_a_length_that_is_not_stated_is_unknown() -> None:
    """Of a tag that is cut off, and of a FLAC at 0 Hz."""
    for num_bytes in range(3, 12):
        assert stated(b"ID3\4\0\0\0\0\0\0\0\0"[:num_bytes]) is None
    flac = bytearray(encode(noise(), "FLAC", "PCM_16"))
    flac[18:21] = bytes([0, 0, flac[20] & 15])
    assert stated(bytes(flac)) is None


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
