"""Compare transcripts with the lexicon: which words it lacks, and in how many utterances."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.runs.ledger import LossBudgetExceededError, LossLimit
from pipeline.runs.names import HELDOUT
from training.decoding.lexicon import MAX_NAMED, Lexicon

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

    def note(self, lexicon: Lexicon, subset: str) -> str:
        """Say what becomes of a subset's utterances with unknown words; empty without any."""
        if not self.counts:
            return ""
        if subset == HELDOUT:
            effect = "they count as errors"
        elif lexicon.unknown:
            effect = f"they are aligned as {lexicon.unknown[0][0]}"
        else:
            effect = "these utterances will not be aligned"
        return f"{self._named(lexicon, subset)}; {effect}"

    def check_loss(self, lexicon: Lexicon, subset: str, loss_budget: float) -> None:
        """Raise LossBudgetExceededError if too many utterances cannot be aligned.

        So it is where unknown words are aligned, and no word is known.
        """
        limit = LossLimit(loss_budget, self.num_utterances)
        is_other = self.num_words > 0 and self.num_unknown == self.num_words
        if is_other or not (lexicon.unknown or limit.allows(self.num_concerned)):
            raise LossBudgetExceededError(
                f"{self._named(lexicon, subset)}; the loss budget is {loss_budget:.2%}: correct "
                "lexicon.txt or the transcripts, or set corpus.unknown_words = 'spn', or raise "
                "loss_budget"
            )

    def _named(self, lexicon: Lexicon, subset: str) -> str:
        """Name the most frequent words, ten at most, and how the lexicon may spell them."""
        named = [word for word, _ in sorted(self.counts.items(), key=lambda each: (-each[1], each))]
        similar = similar_words(named[:MAX_NAMED], lexicon)
        shown = [
            f"{word!r} ({similar[word]!r} is)" if word in similar else repr(word)
            for word in named[:MAX_NAMED]
        ]
        more = ", ..." if len(named) > MAX_NAMED else ""
        words = "1 word" if len(named) == 1 else f"{len(named)} words"
        are = "is" if len(named) == 1 else "are"
        return (
            f"{words} of {self.num_concerned} of {self.num_utterances} {subset} utterances {are} "
            f"not in lexicon.txt: {', '.join(shown)}{more}"
        )


def similar_words(words: Iterable[str], lexicon: Lexicon) -> dict[str, str]:
    """Return the lexicon's word for each that differs in case, apostrophe or Unicode form alone."""
    wanted = {_plain(word): word for word in words}
    return {
        wanted[plain]: known
        for known in lexicon.pronunciations
        if wanted and (plain := _plain(known)) in wanted
    }


def _plain(word: str) -> str:
    if word.isascii():
        return word.casefold().replace("`", "'")
    unified = unicodedata.normalize("NFKC", word.translate(_APOSTROPHES)).casefold()
    return "".join(each for each in unified if unicodedata.category(each) != "Cf")
