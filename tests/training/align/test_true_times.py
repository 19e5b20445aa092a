"""The bootstrap finds phones of synthetic speech where they were spoken."""

from difflib import SequenceMatcher

import numpy as np
import pytest

from jobs.synthesis.sentences import draw_sentence
from jobs.synthesis.speech import Speech, SpeechSynthesizer
from pipeline.filterbank import FRAME_SHIFT_MS, WINDOW_MS
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.normalization import CausalMean
from pipeline.shards import FeatureRow
from tests.training.align.by_monophones import align_by_monophones, row_of
from training.decode.lexicon import SILENCE, Lexicon
from training.decode.senones import PhoneAlignment, Unaligned
from training.settings.decoding import BootstrapConfig

pytestmark = pytest.mark.chaos

VOICES = ("gmw/en-us", "gmw/en-gb-x-rp", "gmw/en-us+f2", "gmw/en-gb-x-rp+f4")
NUM_EACH = 15
STOPS = {"B", "CH", "D", "G", "JH", "K", "P", "T"}
FIRST_BOUNDARY_MS = WINDOW_MS / 2 - FRAME_SHIFT_MS / 2
"""The middle between two windows lies so much after the first sample of the second."""

Phones = list[tuple[str, float]]
"""The phones of an utterance in order, with the times at which they begin, in ms."""


def frame_time(start: int) -> float:
    """Return the time in ms at which a segment begins whose first frame is `start`."""
    return start * FRAME_SHIFT_MS + FIRST_BOUNDARY_MS if start else 0.0


def lateness(ours: Phones, theirs: Phones) -> list[tuple[str, float]]:
    """Return by how many ms each phone that both have begins later in ours, without silences."""
    one, other = ([each for each in some if each[0] != SILENCE] for some in (ours, theirs))
    matcher = SequenceMatcher(None, [p for p, _ in one], [p for p, _ in other], autojunk=False)
    return [
        (one[block.a + n][0], one[block.a + n][1] - other[block.b + n][1])
        for block in matcher.get_matching_blocks()
        for n in range(block.size)
    ]


class Spoken:
    """Spoken holds clean speech of four voices: its words, its features, and its true phones."""

    def __init__(self) -> None:
        generator, synthesizer = np.random.default_rng(4), SpeechSynthesizer()
        self.utterances: list[FeatureRow] = []
        self.speech: dict[str, Speech] = {}
        variants: dict[str, set[tuple[str, ...]]] = {}
        for voice in VOICES:
            synthesizer.select_voice(voice)
            mean = CausalMean()
            for number in range(NUM_EACH):
                text, said = "", ()
                while len(said) != len(text.split()) or not text:  # espeak-ng joins "in the"
                    text = draw_sentence(generator)
                    said = synthesizer.pronounce(text)
                for word, phones in zip(text.split(), said, strict=True):
                    variants.setdefault(word, set()).add(phones)
                name = f"{voice}-{number}"
                self.speech[name] = synthesizer.speak(text).padded(0.2, 0.2)
                features = mean.subtract(log_mel_energies(self.speech[name].samples))
                self.utterances.append(row_of(name, voice, text, features))
        self.lexicon = Lexicon({word: tuple(sorted(some)) for word, some in variants.items()})


@pytest.fixture(scope="module")
def spoken() -> Spoken:
    return Spoken()


@pytest.fixture(scope="module")
def aligned(spoken: Spoken) -> dict[str, PhoneAlignment | Unaligned]:
    config = BootstrapConfig(max_gaussians=4)
    return align_by_monophones(spoken.utterances, spoken.lexicon, config)


def phones_of(aligned: dict[str, PhoneAlignment | Unaligned], spoken: Spoken) -> dict[str, Phones]:
    """Return the bootstrap's phones by utterance, with their beginnings in ms."""
    names = spoken.lexicon.phones
    return {
        name: [
            (names[phone], frame_time(start))
            for phone, start in zip(found.phones.tolist(), found.starts.tolist(), strict=True)
        ]
        for name, found in aligned.items()
        if isinstance(found, PhoneAlignment)
    }


def test_boundaries_lie_where_the_synthesizer_set_them(
    spoken: Spoken, aligned: dict[str, PhoneAlignment | Unaligned]
) -> None:
    """After two minutes of training, three in four of the phones begin within 20 ms of the truth.

    Stops are left out of these: one begins at its burst for espeak-ng, and with its closure here.
    """
    late: list[tuple[str, float]] = []
    num_phones = 0
    for name, ours in phones_of(aligned, spoken).items():
        truth = [(each.phone, 1000 * each.start_s) for each in spoken.speech[name].phones]
        num_phones += sum(phone != SILENCE for phone, _ in truth)
        late += lateness(ours, truth)
    assert len(phones_of(aligned, spoken)) == len(spoken.utterances)
    assert len(late) > 0.95 * num_phones
    others = [ms for phone, ms in late if phone not in STOPS]
    assert np.mean(np.abs(others) <= 20) > 0.72  # seen: 0.77
    assert np.mean([abs(ms) <= 50 for _, ms in late]) > 0.88  # seen: 0.91
    assert abs(np.median(others)) < 8  # seen: -4.5; a frame more would be systematic
