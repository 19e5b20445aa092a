import io
from pathlib import Path

import numpy as np
import pytest
import soundfile

from pipeline.audio.decode import MD5_ONE_IN, AudioError, decode_utterance
from pipeline.audio.flac import StreamInfo, flac_blocks, open_flac, stream_info
from pipeline.filterbank import Engine
from pipeline.settings import NO_CONVERSION
from tests import small_corpus


def encode(samples: np.ndarray, subtype: str = "PCM_16", rate_hz: int = 16_000) -> bytes:
    return small_corpus.encode(samples, "FLAC", subtype, rate_hz)


def noise(num_samples: int = 20_000) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(num_samples) * 0.1


FLAC = encode(noise())


def decoded(data: bytes, info: StreamInfo) -> np.ndarray:
    return np.concatenate(list(flac_blocks(data, info)))[:, 0]


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize("num_samples", [1, 4096, 70_000])
def test_the_samples_are_libflacs(subtype: str, num_samples: int) -> None:
    """To the bit, whatever the depth, also where several reads are needed."""
    data = encode(noise(num_samples), subtype)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_array_equal(decoded(data, stream_info(data)), expected)


def test_real_recordings_have_libflacs_samples_and_their_md5(an4_dir: Path) -> None:
    """AN4, recorded and encoded by others."""
    for path in sorted(an4_dir.glob("audio/*/*.flac"))[:40]:
        data = path.read_bytes()
        expected, _ = soundfile.read(path, dtype="float32")
        np.testing.assert_array_equal(decoded(data, stream_info(data)), expected)
        assert open_flac(data, NO_CONVERSION).md5
        open_flac(data, NO_CONVERSION).cut([])


@pytest.mark.parametrize(("channels", "rate_hz"), [(1, 16_000), (2, 44_100), (8, 192_000)])
def test_the_header_states_rate_channels_and_length(channels: int, rate_hz: int) -> None:
    """As they were written."""
    data = encode(np.stack([noise(5000)] * channels, axis=1), rate_hz=rate_hz)
    assert stream_info(data) == StreamInfo(rate_hz, channels, 5000)


@pytest.mark.parametrize("data", [b"fLaC", FLAC[:41], FLAC[:4] + b"\4" + FLAC[5:]])
def test_no_header_is_an_error(data: bytes) -> None:
    """Too few bytes, or another block before STREAMINFO."""
    with pytest.raises(ValueError, match="no STREAMINFO block"):
        stream_info(data)


def test_no_frame_is_an_error() -> None:
    """A header alone has nothing to decode."""
    with pytest.raises(ValueError, match="no frame can be decoded"):
        decoded(FLAC[:42], stream_info(FLAC))


def test_a_stream_longer_than_stated_is_not_unpacked() -> None:
    """One block at most is decoded, of a minute that takes a few hundred bytes."""
    data = encode(np.zeros(60 * 16_000, np.int16))
    with pytest.raises(AudioError, match="duration_mismatch: more than the 1000 samples"):
        decoded(data, StreamInfo(16_000, 1, 1000))


def with_another_md5(data: bytes) -> bytes:
    return data[:41] + bytes([data[41] ^ 1]) + data[42:]


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
def test_the_md5_is_of_the_integers(subtype: str) -> None:
    """The encoder's MD5 is found again at each depth, and another one is refused."""
    data = encode(noise(), subtype)
    open_flac(data, NO_CONVERSION).cut([])
    with pytest.raises(AudioError, match=f"checksum_mismatch: MD5 .* is {data[26:42].hex()}, the"):
        open_flac(with_another_md5(data), NO_CONVERSION).cut([])
    without = data[:26] + bytes(16) + data[42:]  # an encoder may leave it out
    assert open_flac(without, NO_CONVERSION).md5 is None


def refused(data: bytes, utterance_id: str, declared_s: float, engine: Engine = "fast") -> bool:
    try:
        decode_utterance(data, utterance_id, declared_s, engine)
    except AudioError as error:
        return error.reason == "checksum_mismatch"
    return False


def test_the_md5_of_a_share_is_compared() -> None:
    """By the utterance's id, so that each attempt compares the same; all by the slower engine."""
    data = with_another_md5(encode(noise(1000)))
    names = [f"utterance-{number}" for number in range(400)]
    found = [refused(data, name, 1000 / 16_000) for name in names]
    assert found == [refused(data, name, 1000 / 16_000) for name in names]
    expected = 400 / MD5_ONE_IN["fast"]
    assert abs(sum(found) - expected) < 4 * expected**0.5
    assert all(refused(data, name, 1000 / 16_000, "kaldi") for name in names[:20])


def test_the_md5_is_compared_where_the_duration_leaves_doubt() -> None:
    """All are compared whose length is not what was declared, rounded or cut."""
    data = with_another_md5(FLAC)
    names = [f"utterance-{number}" for number in range(20)]
    assert not all(refused(data, name, 1.25) for name in names)
    assert all(refused(data, name, 1.26) for name in names)
