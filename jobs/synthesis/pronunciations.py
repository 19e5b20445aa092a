"""Make the lexicon from espeak-ng's pronunciations, in the accents of training."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from jobs.synthesis.sentences import draw_sentence, vocabulary
from jobs.synthesis.speech import SpeechSynthesizer

MAX_PRONUNCIATIONS = 3
_NUM_SENTENCES = 1000
# Said this seldom, a pronunciation is a slip at a word boundary (a linking r) rather than a habit.
_MIN_SHARE = 0.02

Lexicon = dict[str, tuple[tuple[str, ...], ...]]


def make_lexicon(accents: Sequence[str], seed: int) -> Lexicon:
    """Collect up to three pronunciations of each word of the grammar, the most frequent first.

    Sentences give words in context ("a" is not "ay"). Sentences in which espeak-ng joins two words
    ("in the") are skipped. `accents` must not contain held-out ones.
    """
    generator = np.random.default_rng((seed, 2))
    texts = [draw_sentence(generator) for _ in range(_NUM_SENTENCES)]
    counts: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    synthesizer = SpeechSynthesizer()
    for accent in accents:
        synthesizer.select_voice(accent)
        for text in (*texts, *vocabulary()):
            words, said = text.split(), synthesizer.pronounce(text)
            if len(words) == len(said):
                for word, phones in zip(words, said, strict=True):
                    counts[word][phones] += 1
    return {word: _most_frequent(counts[word]) for word in vocabulary()}


def lexicon_lines(lexicon: Lexicon) -> list[str]:
    """Return the lines of Kaldi's lexicon.txt: a word and its phones, one pronunciation a line."""
    return [f"{word} {' '.join(phones)}" for word, some in lexicon.items() for phones in some]


def _most_frequent(counts: Counter[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    least = _MIN_SHARE * counts.total()
    return tuple(phones for phones, count in ranked[:MAX_PRONUNCIATIONS] if count >= least)
