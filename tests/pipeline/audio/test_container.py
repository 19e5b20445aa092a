import io

import numpy as np
import pytest
import soundfile

from pipeline.audio.container import (
    ogg_num_samples,
    require_one_wav,
    require_whole_wav,
    riff_shortfall,
)
from pipeline.audio.errors import AudioError


def encode(container: str, subtype: str, num_samples: int = 32000) -> bytes:
    samples = np.random.default_rng(0).standard_normal(num_samples) * 0.1
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format=container, subtype=subtype)
    return file.getvalue()


def test_a_whole_wav_lacks_nothing() -> None:
    """Nor does one with bytes after its end, or without its pad byte."""
    data = encode("WAV", "PCM_16")
    assert riff_shortfall(data) == 0
    assert riff_shortfall(data + b"\0" * 100) == 0
    assert riff_shortfall(encode("WAV", "PCM_U8", 31999)[:-1]) == 0


def test_a_cut_wav_lacks_what_was_cut() -> None:
    """The RIFF header's size against the object's."""
    assert riff_shortfall(encode("WAV", "PCM_16")[:-1000]) == 1000


def test_one_byte_of_a_sample_is_no_pad_byte() -> None:
    """CR LF that became LF once shortens the data by a byte, and moves all that follow."""
    assert riff_shortfall(encode("WAV", "PCM_16")[:-1]) == 1


def require_wav(data: bytes, num_samples: int) -> None:
    require_one_wav(data)
    require_whole_wav(data, num_samples)


def wav_reason(data: bytes, num_samples: int = 32000) -> str:
    with pytest.raises(AudioError) as caught:
        require_wav(data, num_samples)
    return caught.value.reason


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "FLOAT", "DOUBLE", "ALAW"])
@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
def test_a_decoder_must_give_all_samples(container: str, subtype: str) -> None:
    """One sample fewer than the bytes hold is refused, in each plain format."""
    data = encode(container, subtype)
    require_whole_wav(data, 32000)
    assert wav_reason(data, 31999) == "truncated"


@pytest.mark.parametrize("tag", [6, 7])
def test_laws_need_a_byte_a_sample(tag: int) -> None:
    """The tag of A-law or mu-law upon 16-bit samples would decode to twice as many of noise."""
    data = encode("WAV", "PCM_16")
    assert wav_reason(data[:20] + bytes([tag]) + data[21:], 64000) == "not_audio"


@pytest.mark.parametrize("follower", ["WAV", "FLAC", "OGG"])
def test_a_file_behind_a_wav_is_noticed(follower: str) -> None:
    """Its samples would be lost; other bytes behind a WAV are no audio."""
    data = encode("WAV", "PCM_16")
    other = encode(follower, "VORBIS" if follower == "OGG" else "PCM_16")
    assert wav_reason(data + other) == "joined_files"
    require_one_wav(data + b"LIST and more")


@pytest.mark.parametrize("num_newlines", [7, 8])
def test_eight_newlines_show_it_where_no_length_is_stated(num_newlines: int) -> None:
    """Fewer may follow carriage returns by chance: one in 256 does."""
    data = bytearray(encode("WAV", "PCM_16", 400).replace(b"\n", b"\0"))
    data[4:8] = data[40:44] = b"\xff" * 4
    data[100 : 100 + 2 * num_newlines] = b"\r\n" * num_newlines
    if num_newlines == 8:
        assert wav_reason(bytes(data), 400) == "newlines_converted"
    else:
        require_wav(bytes(data), 400)


@pytest.mark.parametrize("subtype", ["PCM_16", "ALAW"])
def test_newlines_of_text_are_noticed(subtype: str) -> None:
    """Each line feed gained a carriage return, however few there are: as many as bytes too many."""
    data = encode("WAV", subtype, 400)
    data = data[:100] + b"\n" + data[101:]
    assert wav_reason(data.replace(b"\n", b"\r\n"), 400) == "newlines_converted"
    require_one_wav(data + b"\r\n\r\n\r\n")


def test_a_vorbis_stream_counts_its_samples() -> None:
    """The last granule position of Vorbis is the number of samples."""
    assert ogg_num_samples(encode("OGG", "VORBIS")) == 32000


def test_an_opus_stream_counts_its_samples() -> None:
    """Opus counts at 48 kHz and includes a pre-skip, which is subtracted."""
    assert ogg_num_samples(encode("OGG", "OPUS")) == 32000


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chained_file_is_another(subtype: str) -> None:
    """Decoders return the first one alone."""
    with pytest.raises(AudioError, match=r"joined_files: another file begins at byte \d+"):
        ogg_num_samples(encode("OGG", subtype) + encode("OGG", subtype, 20000))


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_page_lost_or_damaged_is_noticed(subtype: str) -> None:
    """By the pages' numbers, and by their checksums."""
    data = encode("OGG", subtype, 100000)
    third = data.index(b"OggS", data.index(b"OggS", 4) + 4)
    fourth = data.index(b"OggS", third + 4)
    with pytest.raises(AudioError, match=f"page 2 is missing at byte {third}"):
        ogg_num_samples(data[:third] + data[fourth:])
    with pytest.raises(AudioError, match=f"page at byte {third} has another checksum"):
        ogg_num_samples(data[: third + 99] + bytes([data[third + 99] ^ 1]) + data[third + 100 :])
    with pytest.raises(AudioError, match=f"no page between bytes {third} and {third + 1}"):
        ogg_num_samples(data[:third] + b"!" + data[third:])


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_half_a_page_is_noticed(subtype: str) -> None:
    """One missing byte is."""
    with pytest.raises(ValueError, match="1 more bytes"):
        ogg_num_samples(encode("OGG", subtype)[:-1])


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_missing_last_page_is_noticed(subtype: str) -> None:
    """A cut between two pages leaves whole pages, none of which ends the stream."""
    data = encode("OGG", subtype)
    with pytest.raises(ValueError, match="no page ends the stream"):
        ogg_num_samples(data[: data.rindex(b"OggS")])


def test_half_a_page_header_is_noticed() -> None:
    """A cut within a page's header does not read beyond the end."""
    data = encode("OGG", "VORBIS")
    with pytest.raises(ValueError, match="half a header"):
        ogg_num_samples(data[: data.rindex(b"OggS") + 10])
