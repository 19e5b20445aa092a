import io

import numpy as np
import pytest
import soundfile

from pipeline.audio.container import ogg_num_samples, riff_shortfall


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
    assert riff_shortfall(data[:-1]) == 0


def test_a_cut_wav_lacks_what_was_cut() -> None:
    """The RIFF header's size against the object's."""
    assert riff_shortfall(encode("WAV", "PCM_16")[:-1000]) == 1000


def test_a_vorbis_stream_counts_its_samples() -> None:
    """The last granule position of Vorbis is the number of samples."""
    assert ogg_num_samples(encode("OGG", "VORBIS")) == 32000


def test_an_opus_stream_counts_its_samples_and_its_pre_skip() -> None:
    """Opus counts at 48 kHz and includes a pre-skip below 0.1 s."""
    assert 0 <= ogg_num_samples(encode("OGG", "OPUS")) - 32000 < 1600


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
