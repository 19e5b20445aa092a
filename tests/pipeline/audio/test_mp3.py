import io
import struct

import numpy as np
import pytest
import soundfile

from pipeline.audio.decode import decode_audio
from pipeline.audio.errors import AudioError
from pipeline.audio.mp3 import counted_mp3, parse_header

SECONDS = 4
SAMPLES = np.random.default_rng(0).standard_normal(SECONDS * 16_000).astype(np.float32) * 0.1


def encode(
    rate_hz: int = 16_000, channels: int = 1, mode: str = "VARIABLE", level: float = 0.5
) -> bytes:
    file = io.BytesIO()
    samples = np.repeat(SAMPLES[:, np.newaxis], channels, axis=1)
    options = {"format": "MP3", "bitrate_mode": mode, "compression_level": level}
    soundfile.write(file, samples, rate_hz, **options)
    return file.getvalue()


def without_count(data: bytes) -> bytes:
    header = parse_header(int.from_bytes(data[:4], "big"))
    assert header is not None
    return data[header.num_bytes :]


MP3 = encode()
MARK = MP3.index(b"Xing")


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100])
@pytest.mark.parametrize(("channels", "mode"), [(1, "VARIABLE"), (2, "CONSTANT")])
def test_frames_end_where_the_file_ends(rate_hz: int, channels: int, mode: str) -> None:
    """LAME's files of all rates are frames from the first byte to the last."""
    data = encode(rate_hz, channels, mode)
    whole, num_samples = counted_mp3(data)
    assert whole == data
    assert 0 < num_samples - len(SAMPLES) <= 2 * 1152 + 529


@pytest.mark.parametrize("mark", [b"Xing", b"Info"])
def test_a_count_may_hold_its_own_frame(mark: bytes) -> None:
    """As some writers have it; libsndfile would expect a frame more than there is."""
    (count,) = struct.unpack(">I", MP3[MARK + 8 : MARK + 12])
    data = MP3[:MARK] + mark + MP3[MARK + 4 : MARK + 8] + struct.pack(">I", count + 1)
    np.testing.assert_array_equal(decode_audio(data + MP3[MARK + 12 :]), decode_audio(MP3))


@pytest.mark.parametrize("count", [None, 0, 50])
def test_a_file_without_its_count_is_decoded_whole(count: int | None) -> None:
    """libsndfile alone decodes a third of it, by the bit rate of its first frame."""
    data = without_count(MP3)
    if count is not None:
        data = MP3[: MARK + 8] + struct.pack(">I", count) + MP3[MARK + 12 :]
    alone, _ = soundfile.read(io.BytesIO(data))
    assert len(alone) < 0.7 * len(SAMPLES)
    samples = decode_audio(data)
    # The header that states the encoder's delay is gone, so that its silence comes first.
    late = len(samples) - len(SAMPLES)
    assert 0 < late <= 4 * 576
    whole = decode_audio(MP3)
    delay = int(np.argmax(np.correlate(samples[: 16_000 + late], whole[:16_000])))
    np.testing.assert_allclose(
        samples[delay:][: len(whole)], whole[: len(samples) - delay], atol=1e-3
    )


def test_a_file_of_constant_bit_rate_needs_no_count() -> None:
    """It has all frames by its size already, and has the same samples as counted."""
    counted = encode(mode="CONSTANT")
    assert 0 < len(decode_audio(without_count(counted))) - len(decode_audio(counted)) <= 4 * 576


FAULTS = {
    "not_audio": {
        "no frame": b"\xff\xff" + bytes(100),
        "free bit rate": b"\xff\xf3\x08\xc4" + bytes(1000),
        "one frame before garbage": MP3[:288] + b"garbage",
    },
    "joined_files": {
        "two files": MP3 + MP3,
        "another rate": MP3 + without_count(encode(22_050)),
        "another number of channels": without_count(MP3) + without_count(encode(channels=2)),
        "a tag and a file": MP3 + b"ID3\3\0\0\0\0\0\0" + without_count(MP3),
    },
    "truncated": {
        "a byte less": MP3[:-1],
        "a byte more": MP3 + b"!",
        "a frame less": without_count(MP3)[:-1],
        "a frame less than stated": MP3[: MARK + 8] + b"\0\0\xff\xff" + MP3[MARK + 12 :],
        "a byte within": MP3[:3000] + b"\r" + MP3[3000:],
        "a byte lost": MP3[:3000] + MP3[3001:],
        "zeros within": MP3[:3000] + bytes(1000) + MP3[4000:],
    },
}


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        pytest.param(reason, data, id=name)
        for reason, some in FAULTS.items()
        for name, data in some.items()
    ],
)
def test_what_is_not_one_file_of_frames_is_refused(reason: str, data: bytes) -> None:
    """Each fault by its reason, before any sample is decoded."""
    with pytest.raises(AudioError) as caught:
        counted_mp3(data)
    assert caught.value.reason == reason


def test_a_mark_at_the_end_states_no_count() -> None:
    """The frame of a Layer I, and a tag that ends with the word before a count."""
    with pytest.raises(AudioError, match="not_audio"):
        decode_audio(b"\xff\xff\x14\0" + bytes(28) + b"TAG\0Xing")


@pytest.mark.parametrize(
    "tail",
    [
        b"TAG" + bytes(125),
        b"APETAGEX" + bytes(24),
        bytes(50),
        b"ID3\4\0\x10\0\0\0\x05title" + b"3DI\4\0\x10\0\0\0\x05",
    ],
)
def test_a_tag_at_the_end_is_no_fault(tail: bytes) -> None:
    """ID3v1, APE, filling with zeros, and ID3v2 with a footer."""
    assert counted_mp3(MP3 + tail)[1] == counted_mp3(MP3)[1]
