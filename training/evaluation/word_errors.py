"""Count word errors, and their reduction against a baseline (paper 003 Table II)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WordErrors:
    """WordErrors counts errors against references; `+` sums them over utterances."""

    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0
    reference_words: int = 0

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.reference_words + other.reference_words,
        )

    @property
    def errors(self) -> int:
        """Return the sum of substitutions, insertions and deletions."""
        return self.substitutions + self.insertions + self.deletions

    @property
    def word_error_rate(self) -> float:
        """Return errors in percent of the reference words; raise ValueError if there are none."""
        if not self.reference_words:
            raise ValueError("no reference words: need transcripts to evaluate against")
        return 100 * self.errors / self.reference_words


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> WordErrors:
    """Count the fewest errors that turn `reference` into `hypothesis` (Levenshtein)."""
    import kaldialign  # noqa: PLC0415 - reports of stored errors need none

    # Several alignments may have the fewest errors, which then differ in kind only.
    distance = kaldialign.edit_distance(list(reference), list(hypothesis))
    return WordErrors(distance["sub"], distance["ins"], distance["del"], len(reference))


def werr(baseline: float, system: float) -> float:
    """Return the word error rate reduction in percent of the baseline's rate (003 Table II)."""
    if baseline <= 0:
        raise ValueError(f"baseline word error rate = {baseline}: need more than 0 to reduce it")
    return 100 * (baseline - system) / baseline
