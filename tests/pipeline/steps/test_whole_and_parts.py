"""A file has one verdict and the same samples, read whole, by segments, or as a tar's member."""

import gzip
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, SizeBound, StoreError
from infra.task_metrics import REQUESTS
from pipeline.audio.decode import decode_audio
from pipeline.audio.errors import AudioError
from pipeline.audio.ogg import page_checksum
from pipeline.records import AudioPart, Member, Segment
from pipeline.steps.audio_reads import WantedAudio, read_audio
from tests import small_corpus

RATE = 16_000
NUM_SAMPLES = 5 * RATE
NOISE = np.random.default_rng(0).standard_normal(NUM_SAMPLES) * 0.1


def encode(
    form: str = "WAV", subtype: str = "PCM_16", samples: np.ndarray = NOISE, rate: int = RATE
) -> bytes:
    return small_corpus.encode(samples, form, subtype, rate)


def patched(data: bytes, position: int, new: bytes) -> bytes:
    return data[:position] + new + data[position + len(new) :]


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def chunk(name: bytes, content: bytes, *, is_padded: bool = True) -> bytes:
    return name + u32(len(content)) + content + b"\0" * (is_padded and len(content) % 2)


def riff(*chunks: bytes) -> bytes:
    content = b"WAVE" + b"".join(chunks)
    return b"RIFF" + u32(len(content)) + content


def unmarked(data: bytes) -> bytes:
    """Take the mark of the end from the last page of an Ogg."""
    last = data.rindex(b"OggS")
    page = patched(data[last:], 5, b"\0")
    return data[:last] + patched(page, 22, u32(page_checksum(page)))


def unreturned(data: bytes) -> bytes:
    """Write LF for each CR LF, as a transfer back from Windows does; one is needed."""
    assert b"\r\n" in data
    return data.replace(b"\r\n", b"\n")


def flac_with_block(kind: int, payload: bytes, stated_bytes: int | None = None) -> bytes:
    """Make a FLAC whose only metadata block after STREAMINFO is this one."""
    end = FLAC.index(b"\xff\xf8", 42)  # the first frame's sync code
    num_bytes = len(payload) if stated_bytes is None else stated_bytes
    return FLAC[:42] + bytes([0x80 | kind]) + num_bytes.to_bytes(3, "big") + payload + FLAC[end:]


def ogg_page(packet: bytes) -> bytes:
    """Make one Ogg page that begins and ends a stream, with a correct checksum."""
    header = struct.pack("<4sBBqIIIBB", b"OggS", 0, 6, NUM_SAMPLES, 1, 0, 0, 1, len(packet))
    return patched(header + packet, 22, u32(page_checksum(header + packet)))


WAV, FLAC, MP3 = encode(), encode("FLAC"), encode("MP3", "MPEG_LAYER_III")
VORBIS, OPUS = encode("OGG", "VORBIS"), encode("OGG", "OPUS")
FORM, DATA = WAV[12:36], WAV[36:]
ODD = chunk(b"data", encode(subtype="PCM_U8")[44:-1])
ODD_FORM = encode(subtype="PCM_U8")[12:36]
ID3 = b"ID3\4\0\0\0\0\0\5title"
RANDOM = np.random.default_rng(1).bytes(5000)
EXTENSIBLE = (
    WAV[:16]
    + struct.pack("<IHHIIHH", 40, 0xFFFE, 1, RATE, 2 * RATE, 2, 16)
    + b"\x16\0\x10\0\0\0\0\0"
    + b"\xde\xad\xbe\xef" * 4
    + WAV[36:]
)
SILENT_FIRST = np.concatenate([np.zeros(40_000), NOISE[40_000:]])

GOOD = {
    **{f"WAV {each}": encode(subtype=each) for each in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32")},
    **{f"WAV {each}": encode(subtype=each) for each in ("FLOAT", "DOUBLE", "ALAW", "ULAW")},
    **{f"WAV {each}": encode(subtype=each) for each in ("MS_ADPCM", "IMA_ADPCM", "GSM610")},
    "WAV extensible": encode("WAVEX", "PCM_24"),
    "WAV extensible of A-law": encode("WAVEX", "ALAW"),
    "RF64": encode("RF64"),
    "JUNK before the format": riff(chunk(b"JUNK", bytes(28)), FORM, DATA),
    "LIST before the samples": riff(FORM, chunk(b"LIST", b"INFOodd"), DATA),
    "LIST without its pad byte": riff(FORM, chunk(b"LIST", b"INFOodd", is_padded=False), DATA),
    "LIST behind the samples": riff(FORM, DATA, chunk(b"LIST", b"INFO" + bytes(20))),
    "LIST behind odd samples": riff(ODD_FORM, ODD, chunk(b"LIST", b"INFO" + bytes(20))),
    "samples without their pad byte": riff(ODD_FORM, ODD)[:-1],
    "a header of 100 KB": riff(chunk(b"bext", b"\n" * 100_000), FORM, DATA),
    "a large chunk behind the samples": riff(FORM, DATA, chunk(b"id3 ", b"\r\n" * 50_000)),
    "garbage behind the samples": WAV + b"\xff\1garbage",
    "zeros behind the samples": WAV + bytes(500),
    "converted text behind the samples": WAV + b"\r\n" * 20,
    **{
        f"RIFF size {size}": patched(WAV, 4, u32(size))
        for size in (0, 1, 2**32 - 1, len(WAV), len(WAV) + 36, len(WAV) - 8 | 2**24)
    },
    **{
        f"data size {size:#x}": patched(WAV, 40, u32(size))
        for size in (0, 2**32 - 1, 2**32 - 37, 2**31 - 1, 2**31 - 4096)
    },
    "both sizes 0": patched(patched(WAV, 4, u32(0)), 40, u32(0)),
    "a block size of 1": patched(WAV, 32, b"\1\0"),
    "WAV behind a tag": ID3 + WAV,
    "FLAC": FLAC,
    "FLAC behind a tag": ID3 + FLAC,
    "FLAC of 24 bits": encode("FLAC", "PCM_24"),
    "FLAC with 16 MB of padding": flac_with_block(1, bytes(2**24 - 1)),
    "FLAC whose metadata runs beyond its end": flac_with_block(1, b"", stated_bytes=2**24 - 1),
    "FLAC with a picture of 4 GB": flac_with_block(6, b"\xff" * 64),
    "FLAC with 2^32 - 1 comments": flac_with_block(4, b"\xff" * 8),
    "Vorbis": VORBIS,
    "Vorbis, end not marked": unmarked(VORBIS),
    "Opus": OPUS,
    "Opus, end not marked": unmarked(OPUS),
    "MP3": MP3,
    "MP3 without count": MP3[288:],
    "MP3 behind tags and zeros": ID3 + bytes(100) + ID3 + bytes(2000) + MP3,
    "MP3 before tags": MP3 + b"APETAGEX" + bytes(24) + b"TAG" + bytes(125),
}
BAD = {
    "empty_object": {"no bytes": b""},
    "newlines_converted": {
        "CR LF for LF": WAV.replace(b"\n", b"\r\n"),
        "CR LF for CR": WAV.replace(b"\r", b"\r\n"),
        "CR LF for LF, open length": patched(WAV, 40, u32(0)).replace(b"\n", b"\r\n"),
        "CR LF for LF, silent first": encode(samples=SILENT_FIRST).replace(b"\n", b"\r\n"),
        "CR LF for LF, a chunk behind": riff(FORM, DATA, chunk(b"LIST", bytes(30))).replace(
            b"\n", b"\r\n"
        ),
        "one CR LF for LF": riff(FORM, DATA[:8] + DATA[8:].replace(b"\n", b"0"))
        .replace(b"\x01\x02", b"\x01\n", 1)
        .replace(b"\n", b"\r\n"),
    },
    "truncated": {
        "cut": WAV[:100_000],
        "cut in the header's 64 KB": WAV[:10_000],
        "RIFF's size as cut": patched(WAV[:100_000], 4, u32(99_992)),
        "cut within a sample": patched(patched(WAV, 40, u32(0))[:-1], 4, u32(0)),
        "half a sample": riff(FORM, chunk(b"data", bytes(5) + DATA[8:])),
        "RF64, cut": encode("RF64")[:100_000],
        "FLAC, cut": FLAC[: len(FLAC) // 2],
        "FLAC, a bit changed": patched(FLAC, len(FLAC) // 2, bytes([FLAC[len(FLAC) // 2] ^ 1])),
        "FLAC of more samples": patched(FLAC, 22, struct.pack(">I", 2 * NUM_SAMPLES)),
        "Vorbis, cut": VORBIS[:-100],
        "Vorbis, a bit changed": patched(VORBIS, 9000, bytes([VORBIS[9000] ^ 1])),
        "Opus, cut": OPUS[: len(OPUS) // 2],
        "MP3, cut": MP3[:-100],
        "WAV without its last byte": WAV[:-1],
        "more samples stated": patched(WAV, 40, u32(4 * NUM_SAMPLES)),
        "LF for CR LF": unreturned(WAV),
        "FLAC's header alone": FLAC[:42],
        "FLAC, its last frame's checksum changed": FLAC[:-1] + bytes([FLAC[-1] ^ 1]),
        "FLAC with CR LF for LF": FLAC.replace(b"\n", b"\r\n"),
        "FLAC with LF for CR LF": unreturned(FLAC),
        "Vorbis of an hour on its last page": patched(
            VORBIS, VORBIS.rindex(b"OggS") + 6, struct.pack("<q", 3600 * RATE)
        ),
        "Vorbis of no position on its last page": patched(
            VORBIS, VORBIS.rindex(b"OggS") + 6, b"\xff" * 8
        ),
    },
    "joined_files": {
        "WAV and WAV": WAV + WAV,
        "WAV and FLAC": patched(WAV, 4, u32(0)) + FLAC,
        "FLAC and FLAC": FLAC + FLAC,
        "Vorbis and Vorbis": VORBIS + VORBIS,
        "MP3 and MP3": MP3 + MP3,
    },
    "unknown_length": {"FLAC of no stated length": patched(FLAC, 22, bytes(4))},
    "duration_mismatch": {"FLAC of fewer samples": patched(FLAC, 22, struct.pack(">I", 70_000))},
    "not_audio": {
        **{each: encode(each) for each in ("W64", "AIFF", "AU", "CAF", "NIST")},
        "RIFX": b"RIFX" + WAV[4:],
        "AAC": b"\xff\xf1\x50\x80" + RANDOM,
        "gzip of a FLAC": gzip.compress(FLAC),
        "zeros": bytes(160_000),
        "a FLAC's signature alone": b"fLaC",
        "WAV extensible, garbled": EXTENSIBLE,
        "a rate of 2^32 - 1": patched(WAV, 24, b"\xff" * 4),
        "Vorbis with CR LF for LF": VORBIS.replace(b"\n", b"\r\n"),
        "Opus with CR LF for LF": OPUS.replace(b"\n", b"\r\n"),
        "OGG of Theora": ogg_page(b"\x80theora" + bytes(35)),
        "OGG of Speex": ogg_page(b"Speex   " + bytes(72)),
        "OGG of FLAC": ogg_page(b"\x7fFLAC\1\0\0\1" + FLAC[:42]),
        "MP3 of a tag and no frame": ID3,
        "MP3 whose tag runs beyond its end": b"ID3\3\0\0\x7f\x7f\x7f\x7f" + MP3,
        "MP3 sync and garbage": b"\xff\xfb" + RANDOM,
        "text": b"no audio" * 20_000,
        "raw samples": DATA[8:],
        "another RIFF": b"RIFF" + u32(1000) + b"AVI " + bytes(160_000),
        "an unknown codec": patched(WAV, 20, b"\x34\x12"),
        "PCM under A-law's tag": patched(WAV, 20, b"\6"),
        "no channels": patched(WAV, 22, b"\0\0"),
        "no rate": patched(WAV, 24, bytes(4)),
        "no bits": patched(WAV, 34, b"\0\0"),
        "no format": WAV[:12] + DATA,
        "no samples": WAV[:36],
        "samples twice": riff(FORM, DATA, DATA),
        "an MP4": b"\0\0\0\x20ftypM4A " + bytes(100_000),
    },
    "wrong_sample_rate": {"8 kHz": encode(rate=8_000), "8 kHz, cut": encode(rate=8_000)[:90_000]},
    "not_mono": {"two channels": encode(samples=NOISE.reshape(-1, 2))},
    "silent": {"direct current": encode(samples=np.full(NUM_SAMPLES, 0.5))},
}


def verdicts(folder: Path, uri: str, parts: Sequence[AudioPart | None]) -> list[str | np.ndarray]:
    """Read an object's parts together; return the samples of each, or the reason of its error."""
    wanted = [WantedAudio(f"{folder}/{uri}", SizeBound(2**20), part) for part in parts]
    found: list[str | np.ndarray] = []
    for each in read_audio(ObjectStore((str(folder),)), wanted, 2):
        assert not isinstance(each, StoreError)
        try:
            if isinstance(each, AudioError):
                raise each
            found.append(decode_audio(each.data))
        except AudioError as error:
            found.append(error.reason)
    return found


def written(folder: Path, data: bytes) -> Member:
    """Write a file as an object, and as a member of an archive."""
    (folder / "whole").write_bytes(data)
    (folder / "a.tar").write_bytes(b"\n" * 512 + data + b"\n" * 1024)
    return Member(512, len(data))


def tiles(num_samples: int) -> list[Segment]:
    """Cut a recording at two places, of which none is a block's edge."""
    edges = [0, 20_000, 66_000, num_samples]
    return [Segment(first / RATE, (end - first) / RATE) for first, end in pairwise(edges)]


@pytest.mark.parametrize("kind", GOOD)
def test_segments_and_members_have_the_samples_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Those of segments that tile the file are its samples, to the bit."""
    member = written(tmp_path, GOOD[kind])
    [whole] = verdicts(tmp_path, "whole", [None])
    assert isinstance(whole, np.ndarray), whole
    assert NUM_SAMPLES - 200 <= len(whole) <= NUM_SAMPLES + 2400
    np.testing.assert_array_equal(verdicts(tmp_path, "a.tar", [member])[0], whole)
    segments = verdicts(tmp_path, "whole", tiles(len(whole)))
    assert all(isinstance(each, np.ndarray) for each in segments), segments
    np.testing.assert_array_equal(np.concatenate(segments), whole)


@pytest.mark.parametrize(("form", "num_samples"), [("WAV", 2**15), ("FLAC", 2**15), ("OGG", 2**16)])
def test_a_segment_of_one_block_is_the_first(tmp_path: Path, form: str, num_samples: int) -> None:
    """Alone and from the start, where later blocks of its decoder have the same length."""
    subtype = "VORBIS" if form == "OGG" else "PCM_16"
    (tmp_path / "whole").write_bytes(encode(form, subtype, np.tile(NOISE, 3)))
    [whole] = verdicts(tmp_path, "whole", [None])
    [segment] = verdicts(tmp_path, "whole", [Segment(0.0, num_samples / RATE)])
    np.testing.assert_array_equal(segment, whole[:num_samples])


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        pytest.param(reason, data, id=name)
        for reason, kinds in BAD.items()
        for name, data in kinds.items()
    ],
)
def test_what_refuses_the_whole_refuses_its_parts(tmp_path: Path, reason: str, data: bytes) -> None:
    """Each segment, and the member, by the same reason."""
    member = written(tmp_path, data)
    assert verdicts(tmp_path, "whole", [None]) == [reason]
    assert verdicts(tmp_path, "whole", tiles(NUM_SAMPLES)) == [reason] * 3
    if data:
        assert verdicts(tmp_path, "a.tar", [member]) == [reason]


@pytest.mark.parametrize(
    ("kind", "num_gets"),
    [("WAV PCM_16", 2), ("RIFF size 0", 2), ("data size 0x0", 2), ("zeros behind the samples", 3)],
)
def test_ranges_alone_are_read_of_a_wav(tmp_path: Path, kind: str, num_gets: int) -> None:
    """The header and a segment; of what is behind the samples, a range where there is any."""
    (tmp_path / "whole").write_bytes(GOOD[kind])
    before = REQUESTS.total()
    verdicts(tmp_path, "whole", [Segment(2.5, 0.5)])
    made = REQUESTS.total() - before
    assert made.get == num_gets
    assert made.bytes_received <= 2**16 + 16_000 + 500
