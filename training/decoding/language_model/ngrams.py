"""Count the n-grams of sentences over a closed vocabulary."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

START, END = "<s>", "</s>"
UNKNOWN = ""
"""Takes the place of a word outside the vocabulary; no word of a text is empty."""

Ngram = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NgramCounts:
    """NgramCounts: `by_length[n - 1]` counts the n-grams; `vocabulary` is sorted, </s> last.

    N-grams end in a word or </s>, never in <s>. They may hold UNKNOWN, which no model predicts.
    """

    vocabulary: tuple[str, ...]
    by_length: tuple[Counter[Ngram], ...]


def count_ngrams(
    sentences: Iterable[Sequence[str]], vocabulary: Iterable[str], order: int
) -> NgramCounts:
    """Count the n-grams of up to `order` words.

    Raises ValueError for words outside the vocabulary other than UNKNOWN, and for no sentences.
    """
    if order < 1:
        raise ValueError(f"order = {order}: need at least 1, a unigram")
    words = set(vocabulary)
    by_length: tuple[Counter[Ngram], ...] = tuple(Counter() for _ in range(order))
    for sentence in sentences:
        unknown = sorted(set(sentence) - words - {UNKNOWN})
        if unknown:
            raise ValueError(f"out of vocabulary: {unknown[0]!r}: add it to lexicon.txt")
        for ngram in _ngrams((START, *sentence, END), order):
            by_length[len(ngram) - 1][ngram] += 1
    if not by_length[0]:
        raise ValueError("no sentences: need at least one to estimate a language model")
    return NgramCounts((*sorted(words), END), by_length)


def without_unknown(counts: Counter[Ngram]) -> Counter[Ngram]:
    """Keep the n-grams of known words alone."""
    return Counter({ngram: count for ngram, count in counts.items() if UNKNOWN not in ngram})


def _ngrams(sentence: Ngram, order: int) -> Iterator[Ngram]:
    # The sentence start is a history only, never predicted.
    for end in range(2, len(sentence) + 1):
        for start in range(max(0, end - order), end):
            yield sentence[start:end]
