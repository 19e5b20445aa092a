"""The bootstrap finds phones of synthetic speech where they were spoken, and where Kaldi does."""

import numpy as np
import pytest

from jobs.synthesis.sentences import draw_sentence
from jobs.synthesis.speech import Speech, SpeechSynthesizer
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.normalization import CausalMean
from tests.benchmarks.phone_boundaries import Phones, by_kaldi, frame_time, lateness
from training.align.monophone_hmm import Bootstrap, bootstrap_alignment
from training.decode.lexicon import SILENCE, Lexicon
from training.decode.senones import TranscribedUtterance
from training.settings.decoding import BootstrapConfig

pytestmark = pytest.mark.chaos

VOICES = ("gmw/en-us", "gmw/en-gb-x-rp", "gmw/en-us+f2", "gmw/en-gb-x-rp+f4")
NUM_EACH = 15
STOPS = {"B", "CH", "D", "G", "JH", "K", "P", "T"}


class Spoken:
    """Spoken holds clean speech of four voices: its words, its features, and its true phones."""

    def __init__(self) -> None:
        generator, synthesizer = np.random.default_rng(4), SpeechSynthesizer()
        self.utterances: list[TranscribedUtterance] = []
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
                words = tuple(text.split())
                self.utterances.append(TranscribedUtterance(name, voice, words, features))
        self.lexicon = Lexicon({word: tuple(sorted(some)) for word, some in variants.items()})


@pytest.fixture(scope="module")
def spoken() -> Spoken:
    return Spoken()


@pytest.fixture(scope="module")
def bootstrap(spoken: Spoken) -> Bootstrap:
    config = BootstrapConfig(max_gaussians=4)
    return bootstrap_alignment(spoken.utterances, spoken.lexicon, config)


def phones_of(bootstrap: Bootstrap, spoken: Spoken) -> dict[str, Phones]:
    """Return the bootstrap's phones by utterance, with their beginnings in ms."""
    names = spoken.lexicon.phones
    return {
        name: [
            (names[phone], frame_time(start))
            for phone, start in zip(found.phones.tolist(), found.starts.tolist(), strict=True)
        ]
        for name, found in bootstrap.alignments.items()
    }


def test_boundaries_lie_where_the_synthesizer_set_them(
    spoken: Spoken, bootstrap: Bootstrap
) -> None:
    """After two minutes of training, three in four of the phones begin within 20 ms of the truth.

    Stops are left out of these: one begins at its burst for espeak-ng, and with its closure here.
    """
    late: list[tuple[str, float]] = []
    num_phones = 0
    for name, ours in phones_of(bootstrap, spoken).items():
        truth = [(each.phone, 1000 * each.start_s) for each in spoken.speech[name].phones]
        num_phones += sum(phone != SILENCE for phone, _ in truth)
        late += lateness(ours, truth)
    assert len(bootstrap.alignments) == len(spoken.utterances)
    assert len(late) > 0.95 * num_phones
    others = [ms for phone, ms in late if phone not in STOPS]
    assert np.mean(np.abs(others) <= 20) > 0.72  # seen: 0.77
    assert np.mean([abs(ms) <= 50 for _, ms in late]) > 0.88  # seen: 0.91
    assert abs(np.median(others)) < 8  # seen: -4.5; a frame more would be systematic


def test_boundaries_lie_where_kaldi_sets_them(spoken: Spoken, bootstrap: Bootstrap) -> None:
    """Of the phones of Kaldi's monophones on the same cepstra, 17 in 20 begin within 20 ms of ours.

    Kaldi's mixtures share 1,000 Gaussians, and ours have 4 a state.
    """
    kaldi, ours = by_kaldi(spoken.utterances, spoken.lexicon), phones_of(bootstrap, spoken)
    assert kaldi.keys() == ours.keys()
    late = [ms for name, phones in ours.items() for _, ms in lateness(phones, kaldi[name])]
    num_phones = sum(phone != SILENCE for phones in kaldi.values() for phone, _ in phones)
    assert len(late) > 0.95 * num_phones  # seen: 0.98
    assert np.mean(np.abs(late) <= 20) > 0.85  # seen: 0.90
    assert np.median(late) == 0
