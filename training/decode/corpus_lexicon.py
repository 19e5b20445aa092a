"""A corpus's lexicon as it was read, and the words of transcripts that it lacks."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.engine import LossBudgetExceededError, LossWatch
from pipeline.runs.manifest import sha256
from pipeline.runs.names import HELDOUT, LEXICON_FILE
from training.decode.lexicon import (
    MAX_NAMED,
    RESERVED_WORDS,
    Lexicon,
    decode_lexicon,
    parse_lexicon,
    require_visible,
)
from training.settings.decoding import UnknownWordsRule

if TYPE_CHECKING:
    from training.decode.letter_to_sound import LetterToSound


@dataclass(frozen=True, slots=True)
class CorpusLexicon:
    """CorpusLexicon holds lexicon.txt as it was read, so that a step uses what it digests.

    The rule says how words of transcripts are aligned that it lacks; those that were `made` of
    letters, by the first step that reads it, are words like its own.
    """

    data: bytes
    unknown_words: UnknownWordsRule
    made: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        store: ObjectStore,
        corpus_uri: str,
        unknown_words: UnknownWordsRule,
        made: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> "CorpusLexicon":
        """Read it for a step that uses it."""
        return cls(store.get(join_uri(corpus_uri, LEXICON_FILE)), unknown_words, made)

    @property
    def digests(self) -> dict[str, str]:
        """Return its SHA-256 by its name, as an input of a step."""
        return {LEXICON_FILE: sha256(self.data)}

    def parse(self) -> Lexicon:
        """Read the pronunciations."""
        lexicon = parse_lexicon(decode_lexicon(self.data))
        if self.unknown_words == "spn":
            return lexicon.with_spoken_noise()
        made = {word: (tuple(phones),) for word, phones in self.made.items()}
        return Lexicon({**made, **lexicon.pronunciations}) if made else lexicon

    def pronounced(self, words: Iterable[str]) -> "CorpusLexicon":
        """Make pronunciations of words that it lacks, if the rule says so.

        A word with a letter that no word of it has, one without sound, and one that no lexicon may
        have, as for an invisible character, remain unknown.
        """
        if self.unknown_words != "letters":
            return self
        missing = sorted({*words} - self.parse().pronunciations.keys() - RESERVED_WORDS)
        missing = [word for word in missing if _is_visible(word)]
        if not missing:
            return self
        letters = self.letters()
        spelled = {word: letters.pronounce(word) for word in missing}
        made = {word: phones for word, phones in spelled.items() if phones}
        return replace(self, made={**self.made, **made})

    def letters(self) -> "LetterToSound":
        """Return what lexicon.txt alone says of letters: words made by them teach nothing new."""
        from training.decode.letter_to_sound import LetterToSound  # noqa: PLC0415 - imports NumPy

        return LetterToSound.of(replace(self, made={}).parse())


def _is_visible(word: str) -> bool:
    try:
        require_visible(word, LEXICON_FILE)
    except ValueError:
        return False
    return True


_APOSTROPHES = str.maketrans(dict.fromkeys("\u2019\u2018\u02bc\u0060\u00b4", "'"))


@dataclass
class UnknownWords:
    """UnknownWords counts the utterances that have words without pronunciation, and all others."""

    counts: Counter[str] = field(default_factory=Counter)
    num_concerned: int = 0
    num_utterances: int = 0
    num_words: int = 0
    num_unknown: int = 0

    @classmethod
    def of(cls, transcripts: Iterable[str], lexicon: Lexicon) -> "UnknownWords":
        """Read the transcripts, whose words are separated by blanks."""
        found, known = cls(), lexicon.pronunciations
        for text in transcripts:
            words = text.split()
            unknown = [word for word in words if word not in known]
            found.counts.update(set(unknown))
            found.num_concerned += bool(unknown)
            found.num_utterances += 1
            found.num_words += len(words)
            found.num_unknown += len(unknown)
        return found

    def note(self, lexicon: Lexicon, subset: str, rule: UnknownWordsRule) -> str:
        """Say what becomes of a subset's utterances with unknown words; empty without any."""
        if not self.counts:
            return ""
        if subset == HELDOUT:
            by_letters = ", but those that letters pronounce" if rule == "letters" else ""
            effect = f"they count as errors{by_letters}"
        elif lexicon.unknown:
            effect = f"they are aligned as {lexicon.unknown[0][0]}"
        elif rule == "letters":
            effect = "their letters make pronunciations"
        else:
            effect = "these utterances will not be aligned"
        return f"{self._named(lexicon, subset)}; {effect}"

    def check_loss(
        self,
        lexicon: Lexicon,
        subset: str,
        loss_budget: float,
        rule: UnknownWordsRule,
        others: Sequence[str] = ("letters", "spn"),
    ) -> None:
        """Raise LossBudgetExceededError if too many utterances would not be aligned.

        The error names the `others` that could be set. A lexicon without any of the words is
        refused also where unknown words are aligned. By the rule "letters" there is no loss yet:
        bootstrap makes pronunciations.
        """
        max_lost = LossWatch(loss_budget, self.num_utterances).max_lost
        if 0 < self.num_unknown == self.num_words:
            remedy = "give the lexicon of these transcripts"
        elif lexicon.unknown or rule == "letters" or self.num_concerned <= max_lost:
            return
        else:
            remedy = (
                f"the loss budget is {loss_budget:.2%}: correct lexicon.txt or the transcripts, "
                f"set corpus.unknown_words = {' or '.join(map(repr, others))}, or raise loss_budget"
            )
        raise LossBudgetExceededError(f"{self._named(lexicon, subset)}; {remedy}")

    def _named(self, lexicon: Lexicon, subset: str) -> str:
        """Name the most frequent words, ten at most, and how the lexicon may spell them."""
        ordered = sorted(self.counts, key=lambda word: (-self.counts[word], word))
        named, num = ordered[:MAX_NAMED], len(ordered)
        similar = similar_words(named, lexicon)
        shown = [
            f"{word!r} (it has {similar[word]!r})" if word in similar else repr(word)
            for word in named
        ]
        more = ", ..." if num > MAX_NAMED else ""
        words = "1 word" if num == 1 else f"{num} words"
        return (
            f"lexicon.txt lacks {words}, in {self.num_concerned} of {self.num_utterances} {subset} "
            f"utterances: {', '.join(shown)}{more}"
        )


def similar_words(words: Iterable[str], lexicon: Lexicon) -> dict[str, str]:
    """Return the lexicon's word for each that differs in case, apostrophe or Unicode form alone."""
    plain = {word: plain_spelling(word) for word in words}
    wanted = set(plain.values())
    known = {
        found: word for word in lexicon.pronunciations if (found := plain_spelling(word)) in wanted
    }
    return {word: known[form] for word, form in plain.items() if form in known}


def plain_spelling(word: str) -> str:
    """Return what words share that differ in case, apostrophe or Unicode form alone."""
    if word.isascii():
        return word.casefold().replace("`", "'")
    unified = unicodedata.normalize("NFKC", word.translate(_APOSTROPHES)).casefold()
    return "".join(each for each in unified if unicodedata.category(each) != "Cf")
