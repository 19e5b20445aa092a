"""Measure pronunciations by letters on words that a lexicon has: a tenth of them, held out.

python -m tests.benchmarks.pronunciations --lexicon ../shared/corpora/librispeech/lexicon.txt

A word is right if its phones are one of its variants; phone errors are those against the nearest.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

from kaldialign import edit_distance

from training.decode.letter_to_sound import LetterToSound
from training.decode.lexicon import Lexicon, Pronunciation, parse_lexicon

HELD_OUT_ONE_IN = 10


def is_held_out(word: str) -> bool:
    """Draw words by their names."""
    return int(hashlib.sha256(word.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def num_errors(phones: Pronunciation, variant: Pronunciation) -> int:
    """Count the phones that are wrong, missing or too many."""
    return int(edit_distance(list(variant), list(phones))["total"])


def main() -> None:
    """Learn from nine tenths of the words, and print the errors in the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lexicon", type=Path, required=True)
    words = parse_lexicon(parser.parse_args().lexicon.read_text()).pronunciations
    held_out = {word: variants for word, variants in words.items() if is_held_out(word)}
    started = time.process_time()
    model = LetterToSound.of(Lexicon({w: v for w, v in words.items() if w not in held_out}))
    learned = time.process_time()
    wrong = errors = phones = 0
    for word, variants in held_out.items():
        found = model.pronounce(word)
        least, length = min((num_errors(found, each), len(each)) for each in variants)
        wrong, errors, phones = wrong + bool(least), errors + least, phones + length
    figures = {
        "num_words": len(held_out),
        "word_error_rate": 100 * wrong / len(held_out),
        "phone_error_rate": 100 * errors / phones,
        "learning_cpu_s": learned - started,
        "words_a_cpu_s": len(held_out) / (time.process_time() - learned),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
