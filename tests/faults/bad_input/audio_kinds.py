"""List kinds of bad audio, each made by code, with the reason that the ledger must give."""

import gzip
import io
import struct
from dataclasses import dataclass

import numpy as np
import soundfile

RATE_HZ = 16_000
NUM_SAMPLES = 16_000
_OGG_POLYNOMIAL = 0x04C11DB7


@dataclass(frozen=True)
class Kind:
    """Kind holds an object's bytes, its quarantine's reason (None: good) and its stated length."""

    data: bytes
    reason: str | None
    declared_s: float = 1.0


def noise(num_samples: int = NUM_SAMPLES, scale: float = 0.1) -> np.ndarray:
    """Make noise, always the same."""
    return np.random.default_rng(0).standard_normal(num_samples) * scale


def encode(
    samples: np.ndarray, container: str = "WAV", subtype: str = "PCM_16", rate_hz: int = RATE_HZ
) -> bytes:
    """Encode `samples` as the bytes of a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=container, subtype=subtype)
    return file.getvalue()


def channels(count: int, container: str = "WAV") -> bytes:
    """Repeat the same noise in several channels."""
    return encode(np.stack([noise()] * count, axis=1), container)


def patched(data: bytes, position: int, replacement: bytes) -> bytes:
    """Return `data` with some bytes replaced."""
    return data[:position] + replacement + data[position + len(replacement) :]


def flipped(data: bytes, position: int) -> bytes:
    """Return `data` with one bit changed."""
    return patched(data, position, bytes([data[position] ^ 1]))


def flac_with_block(kind: int, payload: bytes, stated_bytes: int | None = None) -> bytes:
    """Make a FLAC whose only metadata block after STREAMINFO is this one."""
    end = FLAC.index(b"\xff\xf8", 42)  # the first frame's sync code
    num_bytes = len(payload) if stated_bytes is None else stated_bytes
    return FLAC[:42] + bytes([0x80 | kind]) + num_bytes.to_bytes(3, "big") + payload + FLAC[end:]


def ogg_page(packet: bytes) -> bytes:
    """Make one Ogg page that begins and ends a stream, with a correct checksum."""
    header = struct.pack("<4sBBqIIIBB", b"OggS", 0, 6, NUM_SAMPLES, 1, 0, 0, 1, len(packet))
    checksum = 0
    for byte in header + packet:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1) ^ (_OGG_POLYNOMIAL if checksum & 0x80000000 else 0)
            checksum &= 0xFFFFFFFF
    return patched(header, 22, struct.pack("<I", checksum)) + packet


def with_sample(value: float) -> bytes:
    """Make a float WAV with one sample of this value."""
    samples = noise()
    samples[100] = value
    return encode(samples, subtype="FLOAT")


def with_newlines(data: bytes) -> bytes:
    """Write CR LF for each LF, as a transfer of text to Windows does."""
    return data.replace(b"\n", b"\r\n")


def without_returns(data: bytes) -> bytes:
    """Write LF for each CR LF, as the transfer back does; at least one place needs it."""
    assert b"\r\n" in data
    return data.replace(b"\r\n", b"\n")


WAV, FLAC = encode(noise()), encode(noise(), "FLAC")
VORBIS, OPUS = encode(noise(), "OGG", "VORBIS"), encode(noise(), "OGG", "OPUS")
MP3 = encode(noise(), "MP3", "MPEG_LAYER_III")
A_LAW, MU_LAW = encode(noise(), subtype="ALAW"), encode(noise(), subtype="ULAW")
LONG_FLAC, LONG_MP3 = encode(noise(2**18), "FLAC"), encode(noise(2**19), "MP3", "MPEG_LAYER_III")
LONG_VORBIS = encode(noise(2**19), "OGG", "VORBIS")
XING = MP3.index(b"Xing")  # a variable bit rate's frame without sound
UNCOUNTED_MP3 = MP3[288:]
UNTITLED_S = 30 * 576 / RATE_HZ  # with the encoder's and decoder's delay
ID3 = b"ID3\x03\0\0\0\0\0\x0a" + bytes(10)
RANDOM = np.random.default_rng(1).bytes(5000)
EXTENSIBLE = (
    WAV[:16]
    + struct.pack("<IHHIIHH", 40, 0xFFFE, 1, RATE_HZ, 2 * RATE_HZ, 2, 16)
    + b"\x16\0\x10\0\0\0\0\0"
    + b"\xde\xad\xbe\xef" * 4
    + WAV[36:]
)
OPEN_LENGTH = patched(patched(WAV, 4, b"\xff" * 4), 40, b"\xff" * 4)
SOX_LENGTH = patched(patched(WAV, 4, b"\x24\xf0\xff\x7f"), 40, b"\x00\xf0\xff\x7f")

NOT_AUDIO = {
    "no bytes": Kind(b"", "empty_object"),
    "random bytes": Kind(RANDOM, "not_audio"),
    "zeros in place of a file": Kind(bytes(32_000), "not_audio"),
    "HTML error page": Kind(b"<html><body>404 Not Found</body></html>", "not_audio"),
    "S3 error document": Kind(b"<?xml version='1.0'?><Error/>", "not_audio"),
    "JSON": Kind(b'{"error": "expired"}', "not_audio"),
    "gzip of a FLAC": Kind(gzip.compress(FLAC), "not_audio"),
    "AIFF": Kind(encode(noise(), "AIFF"), "not_audio"),
    "W64": Kind(encode(noise(), "W64"), "not_audio"),
    "NIST SPHERE": Kind(encode(noise(), "NIST"), "not_audio"),
    "AVI": Kind(b"RIFF" + struct.pack("<I", 1000) + b"AVI " + bytes(996), "not_audio"),
    "AAC": Kind(b"\xff\xf1\x50\x80" + RANDOM, "not_audio"),
    "signature alone": Kind(b"fLaC", "not_audio"),
}
WAVS = {
    "WAV cut in half": Kind(WAV[: len(WAV) // 2], "truncated"),
    "WAV cut before its data": Kind(WAV[:36], "not_audio"),
    "WAV without format": Kind(WAV[:12] + WAV[36:], "not_audio"),
    "WAV whose data chunk says too much": Kind(
        patched(WAV, 40, struct.pack("<I", 64_000)), "truncated"
    ),
    "WAV whose data chunk says too little": Kind(
        patched(WAV, 40, struct.pack("<I", 8_000)), "duration_mismatch", declared_s=10.0
    ),
    "WAV of no samples": Kind(patched(WAV[:44], 40, bytes(4)), "too_short"),
    "WAV of zero channels": Kind(patched(WAV, 22, bytes(2)), "not_audio"),
    "WAV of rate zero": Kind(patched(WAV, 24, bytes(4)), "not_audio"),
    "WAV of rate 2^32 - 1": Kind(patched(WAV, 24, b"\xff" * 4), "not_audio"),
    "WAV of zero bits": Kind(patched(WAV, 34, bytes(2)), "not_audio"),
    "WAV of an unknown codec": Kind(patched(WAV, 20, b"\x34\x12"), "not_audio"),
    "WAV extensible, garbled": Kind(EXTENSIBLE, "not_audio"),
    "WAV with NaN": Kind(with_sample(np.nan), "non_finite"),
    "WAV with infinity": Kind(with_sample(np.inf), "non_finite"),
    "WAV with a peak of 1e30": Kind(with_sample(1e30), "clipped"),
    "WAV twice in one object": Kind(WAV * 2, "joined_files", declared_s=1.0),
    "WAV and a FLAC in one object": Kind(WAV + FLAC, "joined_files", declared_s=1.0),
    "WAV without its last byte": Kind(WAV[:-1], "truncated"),
    "WAV of open length, cut within a sample": Kind(
        patched(patched(WAV, 4, b"\xff" * 4), 40, b"\xff" * 4)[:-1], "truncated"
    ),
    "WAV with CR LF for LF": Kind(with_newlines(WAV), "newlines_converted"),
    "WAV of open length with CR LF for LF": Kind(
        with_newlines(patched(patched(WAV, 4, b"\xff" * 4), 40, b"\xff" * 4)), "newlines_converted"
    ),
    "WAV with LF for CR LF": Kind(without_returns(WAV), "truncated"),
    "WAV of PCM under A-law's tag": Kind(patched(WAV, 20, b"\6"), "not_audio", declared_s=2.0),
    "WAV of PCM under mu-law's tag": Kind(patched(WAV, 20, b"\7"), "not_audio", declared_s=2.0),
    "WAV in 16-bit units": Kind(encode(noise() * 32768, subtype="FLOAT"), "clipped"),
}
FLACS = {
    "FLAC cut in half": Kind(FLAC[: len(FLAC) // 2], "truncated"),
    "FLAC header alone": Kind(FLAC[:42], "truncated"),
    "FLAC with a bad frame checksum": Kind(flipped(FLAC, len(FLAC) - 1), "truncated"),
    "FLAC with a bit changed": Kind(flipped(FLAC, len(FLAC) // 2), "truncated"),
    "FLAC of no stated length": Kind(patched(FLAC, 22, bytes(4)), "unknown_length"),
    "FLAC of 2^36 samples": Kind(
        patched(FLAC, 21, bytes([FLAC[21] | 15]) + b"\xff" * 4), "too_long"
    ),
    "FLAC of fewer samples than stated": Kind(
        patched(FLAC, 22, struct.pack(">I", 32_000)), "truncated"
    ),
    "FLAC of more samples than stated": Kind(
        patched(FLAC, 22, struct.pack(">I", 8_000)), "duration_mismatch", declared_s=2.0
    ),
    "FLAC twice in one object": Kind(FLAC * 2, "joined_files", declared_s=2.0),
    "FLAC with CR LF for LF": Kind(with_newlines(FLAC), "truncated"),
    "FLAC with LF for CR LF": Kind(
        without_returns(LONG_FLAC), "truncated", declared_s=2**18 / RATE_HZ
    ),
    "FLAC of another MD5, about as long as declared": Kind(
        flipped(FLAC, 30), "checksum_mismatch", declared_s=1.05
    ),
    "FLAC of seven channels": Kind(channels(7, "FLAC"), "not_mono"),
    "FLAC of over an hour": Kind(
        encode(np.zeros(3600 * RATE_HZ + 1, np.int16), "FLAC"), "too_long", declared_s=3600.1
    ),
}
LOSSY = {
    "OGG cut in half": Kind(VORBIS[: len(VORBIS) // 2], "truncated"),
    "OGG without its last page": Kind(
        VORBIS[: VORBIS.rindex(b"OggS")], "duration_mismatch", declared_s=1.05
    ),
    "OGG with a bad page checksum": Kind(
        patched(VORBIS, VORBIS.index(b"OggS", 100) + 22, bytes(4)), "truncated"
    ),
    "OGG of an hour on its last page": Kind(
        patched(VORBIS, VORBIS.rindex(b"OggS") + 6, struct.pack("<q", 3600 * RATE_HZ)), "truncated"
    ),
    "OGG of no position on its last page": Kind(
        patched(VORBIS, VORBIS.rindex(b"OggS") + 6, b"\xff" * 8), "truncated"
    ),
    "OGG twice in one object": Kind(VORBIS * 2, "joined_files", declared_s=2.0),
    "OGG of two files, as long as the first": Kind(
        VORBIS + encode(noise(8_000), "OGG", "VORBIS"), "joined_files"
    ),
    "Opus twice in one object": Kind(OPUS * 2, "joined_files", declared_s=2.0),
    "OGG without a page in its middle": Kind(
        LONG_VORBIS[: LONG_VORBIS.index(b"OggS", 9000)]
        + LONG_VORBIS[LONG_VORBIS.index(b"OggS", LONG_VORBIS.index(b"OggS", 9000) + 4) :],
        "truncated",
        declared_s=2**19 / RATE_HZ,
    ),
    "OGG with CR LF for LF": Kind(with_newlines(VORBIS), "not_audio"),
    "OGG with LF for CR LF": Kind(
        without_returns(LONG_VORBIS), "truncated", declared_s=2**19 / RATE_HZ
    ),
    "Opus with CR LF for LF": Kind(with_newlines(OPUS), "not_audio"),
    "OGG of Theora": Kind(ogg_page(b"\x80theora" + bytes(35)), "not_audio"),
    "OGG of Speex": Kind(ogg_page(b"Speex   " + bytes(72)), "not_audio"),
    "OGG of FLAC": Kind(ogg_page(b"\x7fFLAC\1\0\0\1" + FLAC[:42]), "not_audio"),
    "Opus cut in half": Kind(OPUS[: len(OPUS) // 2], "not_audio"),
    "MP3 cut in half": Kind(MP3[: len(MP3) // 2], "truncated"),
    "MP3 with a gap of zeros": Kind(MP3[:2000] + bytes(1000) + MP3[3000:], "truncated"),
    "MP3 twice in one object": Kind(MP3 * 2, "joined_files", declared_s=2.0),
    "MP3 twice, as long as the first": Kind(MP3 * 2, "joined_files"),
    "MP3 twice with tags": Kind(ID3 + MP3 + ID3 + UNCOUNTED_MP3, "joined_files"),
    "MP3 and one of 48 kHz": Kind(
        MP3 + encode(noise(), "MP3", "MPEG_LAYER_III", 48_000), "joined_files"
    ),
    "MP3 without its last byte": Kind(MP3[:-1], "truncated"),
    "MP3 of more frames than it has": Kind(
        patched(MP3, XING + 8, struct.pack(">I", 60)), "truncated", declared_s=2.0
    ),
    "MP3 with CR LF for LF": Kind(with_newlines(MP3), "truncated"),
    "MP3 with LF for CR LF": Kind(
        without_returns(LONG_MP3), "truncated", declared_s=2**19 / RATE_HZ
    ),
    "MP3 of a tag and no frame": Kind(ID3, "not_audio"),
    "MP3 whose tag runs beyond its end": Kind(b"ID3\x03\0\0\x7f\x7f\x7f\x7f" + MP3, "not_audio"),
    "MP3 sync and garbage": Kind(b"\xff\xfb" + RANDOM, "not_audio"),
    "MP3 of 48 kHz": Kind(encode(noise(), "MP3", "MPEG_LAYER_III", 48_000), "wrong_sample_rate"),
}
SIGNALS = {
    "8 kHz": Kind(encode(noise(), rate_hz=8_000), "wrong_sample_rate"),
    "44.1 kHz": Kind(encode(noise(), rate_hz=44_100), "wrong_sample_rate"),
    "48 kHz": Kind(encode(noise(), rate_hz=48_000), "wrong_sample_rate"),
    "stereo": Kind(channels(2), "not_mono"),
    "seven channels": Kind(channels(7), "not_mono"),
    "no samples": Kind(encode(noise(0)), "too_short", declared_s=0.01),
    "399 samples": Kind(encode(noise(399)), "too_short", declared_s=0.025),
    "four frames": Kind(encode(noise(400 + 3 * 160)), "too_short", declared_s=0.055),
    "digital silence": Kind(encode(np.zeros(NUM_SAMPLES)), "silent"),
    "a constant": Kind(encode(np.full(NUM_SAMPLES, 0.5)), "silent"),
    "clipped": Kind(encode(np.clip(noise() * 20, -1, 1)), "clipped"),
    "shorter than declared": Kind(FLAC, "duration_mismatch", declared_s=3.0),
    "a second off": Kind(FLAC, "duration_mismatch", declared_s=2.0),
    **{
        f"half an utterance of 1.9 s as {name}": Kind(
            encode(noise(15_200), *form), "duration_mismatch", declared_s=1.9
        )
        for name, form in {
            "WAV": (),
            "FLAC": ("FLAC",),
            "Vorbis": ("OGG", "VORBIS"),
            "Opus": ("OGG", "OPUS"),
            "MP3": ("MP3", "MPEG_LAYER_III"),
        }.items()
    },
    "longer than declared": Kind(encode(noise(80_000)), "duration_mismatch", declared_s=0.5),
}
GOOD = {
    "WAV of open length": Kind(OPEN_LENGTH, None),
    "WAV from a SoX pipe": Kind(SOX_LENGTH, None),
    "WAV of length 0, as before it is recorded": Kind(patched(WAV, 40, bytes(4)), None),
    "WAV of another RIFF size": Kind(patched(WAV, 4, struct.pack("<I", len(WAV) + 36)), None),
    "RF64": Kind(encode(noise(), "RF64"), None),
    "MP3 after an ID3 tag and zeros": Kind(ID3 + bytes(500) + MP3, None),
    "WAV of 24 bits": Kind(encode(noise(), subtype="PCM_24"), None),
    "WAV of floats": Kind(encode(noise(), subtype="FLOAT"), None),
    "WAV of 8 bits": Kind(encode(noise(), subtype="PCM_U8"), None),
    "WAV with bytes after its end": Kind(WAV + RANDOM, None),
    "FLAC with 16 MB of padding": Kind(flac_with_block(1, bytes(2**24 - 1)), None),
    "FLAC whose metadata runs beyond its end": Kind(
        flac_with_block(1, b"", stated_bytes=2**24 - 1), None
    ),
    "FLAC with a picture of 4 GB": Kind(flac_with_block(6, b"\xff" * 64), None),
    "FLAC with 2^32 - 1 comments": Kind(flac_with_block(4, b"\xff" * 8), None),
    "FLAC after an ID3 tag": Kind(ID3 + FLAC, None),
    "MP3 after an ID3 tag": Kind(ID3 + MP3, None),
    "five frames": Kind(encode(noise(400 + 4 * 160)), None, declared_s=0.065),
    "a tenth off": Kind(FLAC, None, declared_s=1.1),
    "whole seconds": Kind(encode(noise(41_000)), None, declared_s=3.0),
    "whole seconds, cut": Kind(encode(noise(63_000)), None, declared_s=3.0),
    "WAV of A-law": Kind(A_LAW, None),
    "WAV of mu-law": Kind(MU_LAW, None),
    "WAV extensible of A-law": Kind(encode(noise(), "WAVEX", "ALAW"), None),
    "WAV without its pad byte": Kind(encode(noise(16_001), subtype="PCM_U8")[:-1], None),
    "MP3 of no count": Kind(UNCOUNTED_MP3, None, declared_s=UNTITLED_S),
    "MP3 of a count of 0": Kind(patched(MP3, XING + 8, bytes(4)), None, declared_s=UNTITLED_S),
    "MP3 of a count of half its frames": Kind(
        patched(MP3, XING + 8, struct.pack(">I", 15)), None, declared_s=UNTITLED_S
    ),
    "MP3 twice without counts": Kind(UNCOUNTED_MP3 * 2, None, declared_s=2 * UNTITLED_S),
    "MP3 with a tag at its end": Kind(MP3 + b"TAG" + bytes(125), None),
    "FLAC without MD5": Kind(patched(FLAC, 26, bytes(16)), None, declared_s=1.05),
}
BAD = NOT_AUDIO | WAVS | FLACS | LOSSY | SIGNALS
