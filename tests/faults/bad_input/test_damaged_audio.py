"""Whatever damage a file has: half of it is never accepted, and a FLAC's samples are its own."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from pipeline.audio.decode import AudioError, decode_audio, decode_utterance, duration_tolerance
from tests.faults.bad_input.audio_kinds import noise
from tests.small_corpus import encode

pytestmark = pytest.mark.timeout(300)

NUM_DAMAGES = 1_000
NUM_SAMPLES = 43_200  # 2.7 s, the mean utterance's
SAMPLED_ID = "utt-7"  # its FLAC's MD5 is compared
PADDING = 4 * 576
FILES = {
    "WAV": encode(noise(NUM_SAMPLES)),
    "A-law": encode(noise(NUM_SAMPLES), subtype="ALAW"),
    "FLAC": encode(noise(NUM_SAMPLES), "FLAC"),
    "Vorbis": encode(noise(NUM_SAMPLES), "OGG", "VORBIS"),
    "Opus": encode(noise(NUM_SAMPLES), "OGG", "OPUS"),
    "MP3": encode(noise(NUM_SAMPLES), "MP3", "MPEG_LAYER_III"),
}
FILES["uncounted MP3"] = FILES["MP3"][288:]
Damage = Callable[[bytes, np.random.Generator], bytes]


def part(data: bytes, random: np.random.Generator) -> slice:
    """Choose a part of the data, of a size between a byte and all of it."""
    size = round(len(data) ** random.uniform())
    start = int(random.integers(len(data) - size + 1))
    return slice(start, start + size)


def flip(data: bytes, random: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for _ in range(1 + random.geometric(0.3)):
        changed[random.integers(len(data))] ^= 1 << random.integers(8)
    return bytes(changed)


def flip_header(data: bytes, random: np.random.Generator) -> bytes:
    return flip(data[:128], random) + data[128:]


def cut_end(data: bytes, random: np.random.Generator) -> bytes:
    return data[: -(part(data, random).stop - part(data, random).start) or None] or data[:9]


def lose(data: bytes, random: np.random.Generator) -> bytes:
    lost = part(data, random)
    return data[: lost.start] + data[lost.stop :]


def repeat(data: bytes, random: np.random.Generator) -> bytes:
    twice = part(data, random)
    return data[: twice.stop] + data[twice] + data[twice.stop :]


def blank(data: bytes, random: np.random.Generator) -> bytes:
    lost = part(data, random)
    return data[: lost.start] + bytes(lost.stop - lost.start) + data[lost.stop :]


def insert(data: bytes, random: np.random.Generator) -> bytes:
    where = int(random.integers(len(data)))
    return data[:where] + random.bytes(int(random.integers(1, 40))) + data[where:]


def swap(data: bytes, random: np.random.Generator) -> bytes:
    first, second = sorted(int(random.integers(len(data))) for _ in range(2))
    return data[:first] + data[second:] + data[first:second]


def convert(data: bytes, random: np.random.Generator) -> bytes:
    pairs = [(b"\n", b"\r\n"), (b"\r\n", b"\n"), (b"\r", b"\n"), (b"\n", b"\r"), (b"\0", b"")]
    return data.replace(*pairs[random.integers(len(pairs))])


def join(data: bytes, random: np.random.Generator) -> bytes:
    return data + list(FILES.values())[random.integers(len(FILES))][: part(data, random).stop]


DAMAGES: tuple[Damage, ...] = (
    *(flip, flip_header, cut_end, lose, repeat, blank, insert, swap, convert, join),
)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_accepted_is_whole(kind: str) -> None:
    """As long as the original within the tolerance; of a FLAC, it is the original."""
    whole, random = FILES[kind], np.random.default_rng(5)
    original = decode_audio(whole)
    declared_s = len(original) / 16_000
    missing_s, surplus_s = duration_tolerance(declared_s, PADDING if "MP3" in kind else 1_600)
    assert missing_s < 0.16 * declared_s
    outcomes = Counter[str]()
    for number in range(NUM_DAMAGES):
        damaged = DAMAGES[number % len(DAMAGES)](whole, random)
        try:
            samples = decode_utterance(damaged, SAMPLED_ID, declared_s).samples
        except AudioError as error:
            outcomes[error.reason] += 1
            continue
        outcomes["accepted"] += 1
        assert -missing_s <= len(samples) / 16_000 - declared_s <= surplus_s
        if kind == "FLAC":
            np.testing.assert_array_equal(samples, original)
    assert outcomes["truncated"] > NUM_DAMAGES / 20
