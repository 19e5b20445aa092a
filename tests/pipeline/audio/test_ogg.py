import numpy as np
import pytest

from pipeline.audio.codecs import open_audio
from pipeline.audio.decode import decode_audio
from pipeline.audio.errors import AudioError
from pipeline.audio.ogg import ended_ogg, ogg_num_samples, page_checksum
from pipeline.settings import NO_CONVERSION
from tests import small_corpus

every_codec = pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])


def encode(subtype: str, num_samples: int = 32_000) -> bytes:
    samples = np.random.default_rng(0).standard_normal(num_samples) * 0.1
    return small_corpus.encode(samples, "OGG", subtype)


def counted(data: bytes) -> int:
    return ogg_num_samples(data, small_corpus.SAMPLE_RATE)


@every_codec
def test_a_stream_counts_its_samples(subtype: str) -> None:
    """By the last granule position; Opus counts at 48 kHz, and its pre-skip is subtracted."""
    assert counted(encode(subtype)) == 32_000


@every_codec
def test_a_chained_file_is_another(subtype: str) -> None:
    """Decoders return the first one alone."""
    with pytest.raises(AudioError, match=r"joined_files: another file begins at byte \d+"):
        counted(encode(subtype) + encode(subtype, 20000))


@every_codec
def test_a_page_lost_or_damaged_is_noticed(subtype: str) -> None:
    """By the pages' numbers, and by their checksums."""
    data = encode(subtype, 100000)
    third = data.index(b"OggS", data.index(b"OggS", 4) + 4)
    fourth = data.index(b"OggS", third + 4)
    with pytest.raises(AudioError, match=f"page 2 is missing at byte {third}"):
        counted(data[:third] + data[fourth:])
    with pytest.raises(AudioError, match=f"page at byte {third} has another checksum"):
        counted(data[: third + 99] + bytes([data[third + 99] ^ 1]) + data[third + 100 :])
    with pytest.raises(AudioError, match=f"no page between bytes {third} and {third + 1}"):
        counted(data[:third] + b"!" + data[third:])


@every_codec
def test_an_end_that_is_not_marked_is_one(subtype: str) -> None:
    """A recorder that was stopped leaves whole pages, and as many samples as they state."""
    data = encode(subtype)
    last = data.rindex(b"OggS")
    unmarked = data[:last] + checked(data[last : last + 5] + b"\0" + data[last + 6 :])
    assert ended_ogg(unmarked) == data
    assert ended_ogg(data) == data
    np.testing.assert_array_equal(decode_audio(unmarked), decode_audio(data))
    cut = encode(subtype, 160_000)
    cut = cut[: cut.rindex(b"OggS")]
    assert len(decode_audio(cut)) == pytest.approx(counted(cut), abs=2_000)


@every_codec
def test_a_length_of_years_is_read_to_the_samples_end(subtype: str) -> None:
    """One read behind them, whatever the last page states; its sum is right."""
    data = encode(subtype)
    last = data.rindex(b"OggS")
    years = (2**62).to_bytes(8, "little")
    stated = data[:last] + checked(data[last : last + 6] + years + data[last + 14 :])
    blocks = [len(each) for each in open_audio(stated, NO_CONVERSION).blocks()]
    assert sum(blocks) >= 32_000
    assert len(blocks) <= 6


def test_a_packet_that_does_not_end_is_noticed() -> None:
    """Its page says that the next one has the rest, which is not there."""
    data = encode("VORBIS")
    last = data.rindex(b"OggS")
    num_segments = data[last + 26]
    page = bytearray(data[last : last + 27 + num_segments]) + bytes(255 * num_segments)
    page[5] = 0
    page[27 : 27 + num_segments] = b"\xff" * num_segments
    with pytest.raises(AudioError, match="truncated: no page ends the packet"):
        counted(data[:last] + checked(bytes(page)))


def checked(page: bytes) -> bytes:
    return page[:22] + page_checksum(page).to_bytes(4, "little") + page[26:]


def test_half_a_page_is_noticed() -> None:
    """One missing byte is; a cut within a page's header does not read beyond the end."""
    data = encode("VORBIS")
    with pytest.raises(ValueError, match="1 more bytes"):
        counted(data[:-1])
    with pytest.raises(ValueError, match="half a header"):
        counted(data[: data.rindex(b"OggS") + 10])
