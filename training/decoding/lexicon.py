"""Read words and their pronunciations from Kaldi's lexicon.txt."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

SILENCE = "SIL"
SILENCE_ID = 0
RESERVED_WORDS = frozenset({"<eps>", "<s>", "</s>", "#0"})
Pronunciation = tuple[str, ...]


@dataclass(frozen=True)
class Lexicon:
    """Lexicon maps words to pronunciations; `phones` lists the phone inventory, silence first."""

    pronunciations: Mapping[str, tuple[Pronunciation, ...]]

    def __post_init__(self) -> None:
        """Refuse a lexicon without words, reserved words and empty pronunciations."""
        if not self.pronunciations:
            raise ValueError("the lexicon has no words: need lines `WORD PHONE PHONE ...`")
        for word, variants in self.pronunciations.items():
            if word in RESERVED_WORDS:
                raise ValueError(f"word {word!r}: reserved for the decoding graph, rename it")
            if not variants or not all(variants):
                raise ValueError(f"word {word!r} has an empty pronunciation: need its phones")

    @cached_property
    def phones(self) -> tuple[str, ...]:
        """Return the phone inventory: silence, then the others in alphabetical order."""
        spoken = {
            phone
            for variants in self.pronunciations.values()
            for pronunciation in variants
            for phone in pronunciation
        }
        return (SILENCE, *sorted(spoken - {SILENCE}))

    @cached_property
    def phone_ids(self) -> dict[str, int]:
        """Return the position of each phone in `phones`."""
        return {phone: index for index, phone in enumerate(self.phones)}

    def restricted_to(self, words: Iterable[str]) -> "Lexicon":
        """Keep the pronunciations of `words` only; raise ValueError for unknown words."""
        wanted = sorted(set(words))
        self.require(wanted)
        return Lexicon({word: self.pronunciations[word] for word in wanted})

    def require(self, words: Iterable[str]) -> None:
        """Raise ValueError naming the words that the lexicon lacks, ten at most."""
        missing = sorted(set(words) - self.pronunciations.keys())
        if missing:
            named = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
            raise ValueError(
                f"out of vocabulary: {named} ({len(missing)} words): "
                "add the pronunciations to lexicon.txt"
            )


def parse_lexicon(text: str) -> Lexicon:
    """Read Kaldi's lexicon.txt: lines `WORD PHONE PHONE ...`, variants as more lines or `WORD(2)`.

    Raises ValueError, which names the line, for a word without phones.
    """
    pronunciations: dict[str, dict[Pronunciation, None]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if len(fields) == 1:
            raise ValueError(
                f"lexicon line {number}: {line.strip()!r} has no phones after the word"
            )
        if fields:
            word = re.sub(r"\(\d+\)$", "", fields[0])
            pronunciations.setdefault(word, {})[tuple(fields[1:])] = None
    return Lexicon({word: tuple(variants) for word, variants in pronunciations.items()})
