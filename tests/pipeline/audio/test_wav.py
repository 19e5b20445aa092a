import io

import numpy as np
import pytest
import soundfile

from pipeline.audio.codecs import open_audio
from pipeline.audio.decode import decode_audio
from pipeline.audio.errors import AudioError
from pipeline.audio.wav import is_open_length, pcm_pieces, samples_of, wav_file, wav_layout
from pipeline.settings import NO_CONVERSION
from tests.small_corpus import encode

WAV = encode(np.random.default_rng(0).standard_normal(400) * 0.1)


def test_a_wav_is_what_libsndfile_writes() -> None:
    """Its bytes, of the same format and samples."""
    assert wav_file(WAV[20:36], WAV[44:]) == WAV


def test_the_samples_are_libsndfiles() -> None:
    """To the bit, for every 16-bit integer, and in a file of several blocks."""
    integers = np.resize(np.arange(-(2**15), 2**15), 150_000).astype("<i2")
    data = wav_file(WAV[20:36], integers.tobytes())
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    file = open_audio(data, NO_CONVERSION)
    np.testing.assert_array_equal(np.concatenate(list(file.blocks())), expected)


@pytest.mark.parametrize("num_newlines", [7, 8])
def test_eight_newlines_show_it_where_no_length_is_stated(num_newlines: int) -> None:
    """Fewer may follow carriage returns by chance: one in 256 does."""
    data = bytearray(WAV.replace(b"\n", b"\0"))
    data[4:8] = data[40:44] = b"\xff" * 4
    data[100 : 100 + 2 * num_newlines] = b"\r\n" * num_newlines
    if num_newlines == 8:
        with pytest.raises(AudioError, match="newlines_converted: each of 8 line feeds follows"):
            decode_audio(bytes(data))
    else:
        assert len(decode_audio(bytes(data))) == 400


def test_a_single_newline_ends_the_search() -> None:
    """Bytes behind a WAV's samples are no sign, where line feeds and returns are alone."""
    data = WAV[:60] + b"\n\0\r\0" + WAV[64:]
    np.testing.assert_array_equal(decode_audio(data + b"\r\n\r\n\r\n"), decode_audio(data))


@pytest.mark.parametrize("tag", [6, 7])
def test_laws_need_a_byte_a_sample(tag: int) -> None:
    """The tag of A-law or mu-law upon 16-bit samples would decode to twice as many of noise."""
    with pytest.raises(AudioError, match=r"not_audio: .*-law of 16 bits: need 8"):
        decode_audio(WAV[:20] + bytes([tag]) + WAV[21:])


def test_a_header_without_end_is_left_soon() -> None:
    """Chunks of no bytes, as many as 16 MB hold, are no WAV."""
    data = b"RIFF\0\0\0\0WAVE" + b"JUNK\0\0\0\0" * 2**21
    num_reads = 0

    def read(first: int, num_bytes: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        return data[first : first + num_bytes]

    with pytest.raises(AudioError, match="not_audio: a WAV without samples"):
        wav_layout(read, len(data))
    assert num_reads <= 1000


@pytest.mark.parametrize(
    ("num_bytes", "is_open"),
    [
        *((0, True), (1, False), (32_000, False), (2**31 - 5000, False), (2**32 - 5000, False)),
        *((0x7FFFF000, True), (0x7FFFFFFF, True), (0xFFFFFFFF, True), (0xFFFFFFFF - 36, True)),
    ],
)
def test_lengths_that_pipes_have(num_bytes: int, is_open: bool) -> None:
    """Those of SoX, ffmpeg, Kaldi, and of writers that subtract their header's bytes."""
    assert is_open_length(num_bytes) is is_open


@pytest.mark.parametrize("stated", [WAV[40:44], b"\0" * 4, b"\xff" * 4])
def test_a_piped_wav_is_its_samples(stated: bytes) -> None:
    """So is one that states no length, as ffmpeg and arecord write: its header is not heard."""
    pieces = pcm_pieces(io.BytesIO(WAV[:40] + stated + WAV[44:]), 160)
    np.testing.assert_array_equal(np.concatenate(list(pieces)), samples_of(WAV[44:]))
