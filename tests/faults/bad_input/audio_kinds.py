"""List kinds of bad audio, each made by code, with the reason that the ledger must give.

There is a kind for each reason, and those whose verdict depends on the length that metadata state.
What else is refused, and by what reason, is in tests/pipeline/steps/test_whole_and_parts.py.
"""

import struct
from dataclasses import dataclass

import numpy as np

from tests.small_corpus import encode

RATE_HZ = 16_000
NUM_SAMPLES = 16_000


@dataclass(frozen=True)
class Kind:
    """Kind holds an object's bytes, its quarantine's reason (None: good) and its stated length."""

    data: bytes
    reason: str | None
    declared_s: float = 1.0


def noise(num_samples: int = NUM_SAMPLES, scale: float = 0.1) -> np.ndarray:
    """Make noise, always the same."""
    return np.random.default_rng(0).standard_normal(num_samples) * scale


def patched(data: bytes, position: int, replacement: bytes) -> bytes:
    """Return `data` with some bytes replaced."""
    return data[:position] + replacement + data[position + len(replacement) :]


def with_sample(value: float) -> bytes:
    """Make a float WAV with one sample of this value."""
    samples = noise()
    samples[100] = value
    return encode(samples, subtype="FLOAT")


WAV, FLAC = encode(noise()), encode(noise(), "FLAC")
VORBIS, OPUS = encode(noise(), "OGG", "VORBIS"), encode(noise(), "OGG", "OPUS")
MP3 = encode(noise(), "MP3", "MPEG_LAYER_III")
UNCOUNTED_MP3 = MP3[288:]
UNTITLED_S = 30 * 576 / RATE_HZ  # with the encoder's and decoder's delay
FORMS = {
    "WAV": (),
    "FLAC": ("FLAC",),
    "Vorbis": ("OGG", "VORBIS"),
    "Opus": ("OGG", "OPUS"),
    "MP3": ("MP3", "MPEG_LAYER_III"),
}

BAD = {
    "no bytes": Kind(b"", "empty_object"),
    "HTML error page": Kind(b"<html><body>404 Not Found</body></html>", "not_audio"),
    "signature alone": Kind(b"fLaC", "not_audio"),
    "WAV cut in half": Kind(WAV[: len(WAV) // 2], "truncated"),
    "WAV with CR LF for LF": Kind(WAV.replace(b"\n", b"\r\n"), "newlines_converted"),
    "WAV twice in one object": Kind(WAV * 2, "joined_files"),
    "WAV whose data chunk says too little": Kind(
        patched(WAV, 40, struct.pack("<I", 8_000)), "duration_mismatch", declared_s=10.0
    ),
    "WAV of no samples": Kind(patched(WAV[:44], 40, bytes(4)), "too_short"),
    "WAV with NaN": Kind(with_sample(np.nan), "non_finite"),
    "WAV with infinity": Kind(with_sample(np.inf), "non_finite"),
    "WAV with a peak of 1e30": Kind(with_sample(1e30), "clipped"),
    "WAV in 16-bit units": Kind(encode(noise() * 32768, subtype="FLOAT"), "clipped"),
    "FLAC of no stated length": Kind(patched(FLAC, 22, bytes(4)), "unknown_length"),
    "FLAC of 2^36 samples": Kind(
        patched(FLAC, 21, bytes([FLAC[21] | 15]) + b"\xff" * 4), "too_long"
    ),
    "FLAC of over an hour": Kind(
        encode(np.zeros(3600 * RATE_HZ + 1, np.int16), "FLAC"), "too_long", declared_s=3600.1
    ),
    "FLAC of another MD5, about as long as declared": Kind(
        patched(FLAC, 30, bytes([FLAC[30] ^ 1])), "checksum_mismatch", declared_s=1.05
    ),
    "OGG without its last page": Kind(
        VORBIS[: VORBIS.rindex(b"OggS")], "duration_mismatch", declared_s=1.05
    ),
    "MP3 twice, as long as the first": Kind(MP3 * 2, "joined_files"),
    "48 kHz": Kind(encode(noise(), sample_rate=48_000), "wrong_sample_rate"),
    "seven channels": Kind(encode(np.stack([noise()] * 7, axis=1)), "not_mono"),
    "no samples": Kind(encode(noise(0)), "too_short", declared_s=0.01),
    "399 samples": Kind(encode(noise(399)), "too_short", declared_s=0.025),
    "four frames": Kind(encode(noise(400 + 3 * 160)), "too_short", declared_s=0.055),
    "digital silence": Kind(encode(np.zeros(NUM_SAMPLES)), "silent"),
    "a last bit that changes": Kind(encode(np.tile([0, 2**-15], NUM_SAMPLES // 2)), "silent"),
    "clipped": Kind(encode(np.clip(noise() * 20, -1, 1)), "clipped"),
    "shorter than declared": Kind(FLAC, "duration_mismatch", declared_s=3.0),
    "a second off": Kind(FLAC, "duration_mismatch", declared_s=2.0),
    "longer than declared": Kind(encode(noise(80_000)), "duration_mismatch", declared_s=0.5),
    **{
        f"half an utterance of 1.9 s as {name}": Kind(
            encode(noise(15_200), *form), "duration_mismatch", declared_s=1.9
        )
        for name, form in FORMS.items()
    },
}
GOOD = {
    "WAV with bytes after its end": Kind(WAV + np.random.default_rng(1).bytes(5000), None),
    "FLAC without MD5": Kind(patched(FLAC, 26, bytes(16)), None, declared_s=1.05),
    "five frames": Kind(encode(noise(400 + 4 * 160)), None, declared_s=0.065),
    "a tenth off": Kind(FLAC, None, declared_s=1.1),
    "whole seconds": Kind(encode(noise(41_000)), None, declared_s=3.0),
    "whole seconds, cut": Kind(encode(noise(63_000)), None, declared_s=3.0),
    "MP3 of no count": Kind(UNCOUNTED_MP3, None, declared_s=UNTITLED_S),
    "MP3 twice without counts": Kind(UNCOUNTED_MP3 * 2, None, declared_s=2 * UNTITLED_S),
}
