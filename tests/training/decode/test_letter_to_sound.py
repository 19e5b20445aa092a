"""Pronunciations by letters: a lexicon that letters decide, alignments by brute force, a beam."""

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from training.decode import letter_to_sound
from training.decode.corpus_lexicon import CorpusLexicon
from training.decode.letter_to_sound import LetterToSound, align_letters
from training.decode.lexicon import Lexicon

PHONES_OF = {"a": ("AA",), "b": ("B",), "c": ("K",), "h": (), "x": ("K", "S"), "e": ("IY",)}


def spelled(word: str) -> tuple[str, ...]:
    """Speak each letter as it always is, but `ch` as CH, and an `e` at the end not at all."""
    phones: list[str] = []
    for place, letter in enumerate(word):
        if letter == "c" and word[place + 1 : place + 2] == "h":
            phones.append("CH")
        elif not (letter == "e" and place == len(word) - 1):
            phones.extend(PHONES_OF[letter])
    return tuple(phones)


def regular_lexicon(words: list[str]) -> Lexicon:
    return Lexicon({word: (spelled(word),) for word in words if spelled(word)})


WORDS = ["".join(each) for n in range(1, 5) for each in itertools.product("abchxe", repeat=n)]


def test_words_that_letters_decide_are_pronounced_without_error() -> None:
    """Silent letters, letters of two phones, and letters that the next one changes."""
    generator = np.random.default_rng(3)
    known = {str(word) for word in generator.choice(WORDS, len(WORDS) // 2, replace=False)}
    model = LetterToSound.of(regular_lexicon(sorted(known)))
    others = [word for word in WORDS if word not in known and spelled(word) and len(word) > 1]
    wrong = [word for word in others if model.pronounce(word) != spelled(word)]
    assert len(others) > 700
    assert len(wrong) <= 0.02 * len(others), wrong[:20]


def test_memory_is_that_of_the_graphones_that_occur() -> None:
    """Two thousand letters and two hundred phones would be 0.6 GB as an array of all graphones."""
    pairs = [(chr(0x4E00 + n), (f"I{n % 20}", f"F{n % 180}")) for n in range(2000)]
    tracemalloc.start()
    aligned = align_letters(pairs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert aligned == [[pair] for pair in pairs]
    assert peak < 20e6


def brute_force_counts(
    pairs: list[tuple[str, tuple[str, ...]]], weights: dict[tuple[str, tuple[str, ...]], float]
) -> Counter[tuple[str, tuple[str, ...]]]:
    """Return the expected count of each graphone, by a sum over all alignments of each word."""
    counts = Counter[tuple[str, tuple[str, ...]]]()
    for word, phones in pairs:
        ways = []
        for taken in itertools.product(range(3), repeat=len(word)):
            if sum(taken) == len(phones):
                places = [0, *itertools.accumulate(taken)]
                ways.append(
                    [(w, phones[p : p + n]) for w, p, n in zip(word, places, taken, strict=False)]
                )
        scores = [float(np.prod([weights.get(each, 1.0) for each in way])) for way in ways]
        for way, score in zip(ways, scores, strict=True):
            for each in way:
                counts[each] += score / sum(scores)
    return counts


def test_alignments_are_those_of_expectation_maximization() -> None:
    """Ten rounds over all alignments, one by one, and the most probable of them at last."""
    pairs = [("ab", ("X", "Y")), ("b", ("Y",)), ("aab", ("X", "Y")), ("ba", ("Y", "Z", "X"))]
    weights: dict[tuple[str, tuple[str, ...]], float] = {}
    for _ in range(letter_to_sound.NUM_ITERATIONS):
        counts = brute_force_counts(pairs, weights)
        weights = {each: count / counts.total() for each, count in counts.items()}
    for (word, phones), found in zip(pairs, align_letters(pairs), strict=True):
        assert [letter for letter, _ in found] == [*word]
        assert tuple(phone for _, some in found for phone in some) == phones
        best = max(
            float(
                np.prod(
                    [
                        weights[w, phones[p : p + n]]
                        for w, p, n in zip(word, places, taken, strict=False)
                    ]
                )
            )
            for taken in itertools.product(range(3), repeat=len(word))
            if sum(taken) == len(phones)
            for places in [[0, *itertools.accumulate(taken)]]
        )
        assert float(np.prod([weights[each] for each in found])) == pytest.approx(best)


def test_the_beam_finds_what_a_search_of_all_graphones_finds() -> None:
    """On a small lexicon: the most probable sequence of graphones, whatever its histories are."""
    model = LetterToSound.of(regular_lexicon(WORDS[:300:3]))
    entries = {entry.ngram: entry for entry in model.model}

    def log_probability(history: tuple[str, ...], word: str) -> float:
        if (entry := entries.get((*history, word))) is not None:
            return entry.log_probability
        weight = entries[history].log_backoff if history in entries else 0.0
        return weight + log_probability(history[1:], word)

    words = model.model.words
    for word in ("abx", "che", "hxe", "bac"):
        best: tuple[float, tuple[str, ...]] = (-np.inf, ())
        for graphones in itertools.product(*(model.of_letter[letter] for letter in word)):
            history: tuple[str, ...] = ("<s>",)
            total = 0.0
            for each in (*(words[number] for number in graphones), "</s>"):
                total += log_probability(history[-letter_to_sound.ORDER + 1 :], each)
                history = (*history, each)
            phones = tuple(p for number in graphones for p in model.graphones[number][1])
            best = max(best, (total, phones))
        assert model.pronounce(word) == best[1]


def test_letters_that_no_word_has_are_not_pronounced() -> None:
    """Nor is a word of silent letters alone; noises of the lexicon teach nothing."""
    model = LetterToSound.of(
        Lexicon({**regular_lexicon(WORDS[:200]).pronunciations, "[z]": (("N",),)})
    )
    assert model.pronounce("z") == ()
    assert model.pronounce("") == ()
    with pytest.raises(ValueError, match="no word of the lexicon has two phones a letter"):
        LetterToSound.of(Lexicon({"a": (("A", "B", "C"),)}))


def test_words_that_no_lexicon_may_have_are_not_pronounced() -> None:
    """A joiner at a word's end, as in Persian text: an exported model would be refused."""
    data = "".join(
        f"{word} {' '.join(p[0])}\n"
        for word, p in regular_lexicon(WORDS[:300:3]).pronunciations.items()
    )
    made = CorpusLexicon(data.encode(), "letters").pronounced(["abx", "ab\u200c"]).made
    assert made.keys() == {"abx"}


def test_a_model_is_the_same_each_time() -> None:
    """Also where the lexicon lists its words in another order."""
    lexicon = regular_lexicon(WORDS[:400])
    turned = Lexicon(dict(reversed(lexicon.pronunciations.items())))
    one, other = LetterToSound.of(lexicon), LetterToSound.of(turned)
    assert one.graphones == other.graphones
    assert one.model.ngrams.tobytes() == other.model.ngrams.tobytes()
