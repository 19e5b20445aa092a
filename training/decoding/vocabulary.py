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
        """Raise LossBudgetExceededError if too many utterances would not be aligned.

        A lexicon without any of the words is refused also where unknown words are aligned.
        """
        limit = LossLimit(loss_budget, self.num_utterances)
        if 0 < self.num_unknown == self.num_words:
            remedy = "give the lexicon of these transcripts"
        elif lexicon.unknown or limit.allows(self.num_concerned):
            return
        else:
            remedy = (
                f"the loss budget is {loss_budget:.2%}: correct lexicon.txt or the transcripts, "
                "set corpus.unknown_words = 'spn', or raise loss_budget"
            )
        raise LossBudgetExceededError(f"{self._named(lexicon, subset)}; {remedy}")

    def _named(self, lexicon: Lexicon, subset: str) -> str:
        """Name the most frequent words, ten at most, and how the lexicon may spell them."""
        named = [word for word, _ in sorted(self.counts.items(), key=lambda each: (-each[1], each))]
        similar = similar_words(named[:MAX_NAMED], lexicon)
        shown = [
            f"{word!r} (it has {similar[word]!r})" if word in similar else repr(word)
            for word in named[:MAX_NAMED]
        ]
        more = ", ..." if len(named) > MAX_NAMED else ""
        words = "1 word" if len(named) == 1 else f"{len(named)} words"
        return (
            f"lexicon.txt lacks {words}, in {self.num_concerned} of {self.num_utterances} {subset} "
            f"utterances: {', '.join(shown)}{more}"
        )


def similar_words(words: Iterable[str], lexicon: Lexicon) -> dict[str, str]:
    """Return the lexicon's word for each that differs in case, apostrophe or Unicode form alone."""
    plain = {word: _plain(word) for word in words}
    wanted = set(plain.values())
    known = {found: word for word in lexicon.pronunciations if (found := _plain(word)) in wanted}
    return {word: known[form] for word, form in plain.items() if form in known}


def _plain(word: str) -> str:
    if word.isascii():
        return word.casefold().replace("`", "'")
    unified = unicodedata.normalize("NFKC", word.translate(_APOSTROPHES)).casefold()
    return "".join(each for each in unified if unicodedata.category(each) != "Cf")
