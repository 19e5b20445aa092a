"""Estimate an interpolated Witten-Bell n-gram model over a closed vocabulary, as ARPA text."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

START, END = "<s>", "</s>"
NEVER = -99.0  # ARPA's log10 of zero
Ngram = tuple[str, ...]


@dataclass
class _History:
    num_tokens: int = 0
    num_types: int = 0

    @property
    def backoff_weight(self) -> float:
        """Return Witten-Bell's share of words not seen after this history: T / (N + T)."""
        return self.num_types / (self.num_tokens + self.num_types)


@dataclass
class _Counts:
    """_Counts holds the counts of n-grams and histories, and interpolates them (Witten-Bell)."""

    vocabulary: list[str]
    ngrams: Counter[Ngram]
    histories: dict[Ngram, _History] = field(default_factory=lambda: defaultdict(_History))

    def __post_init__(self) -> None:
        for ngram, count in self.ngrams.items():
            history = self.histories[ngram[:-1]]
            history.num_tokens += count
            history.num_types += 1

    def probability(self, ngram: Ngram) -> float:
        """Return P(w | h) = (c(hw) + T(h) P(w | shorter h)) / (N(h) + T(h)).

        N counts tokens and T types after h; below unigrams P is uniform.
        """
        if not ngram:
            return 1 / len(self.vocabulary)
        history = self.histories[ngram[:-1]]
        shorter = self.probability(ngram[1:])
        unseen = history.num_types * shorter
        return (self.ngrams[ngram] + unseen) / (history.num_tokens + history.num_types)


def witten_bell_arpa(
    sentences: Iterable[Sequence[str]], vocabulary: Iterable[str], order: int = 3
) -> str:
    """Return ARPA text of the n-gram model of `sentences`; after each history P sums to one.

    Words of `vocabulary` that never occur share the unigrams' unseen mass. Raises ValueError for
    words outside it, and for no sentences.
    """
    if order < 1:
        raise ValueError(f"order = {order}: need at least 1, a unigram")
    known = set(vocabulary)
    ngrams: Counter[Ngram] = Counter()
    for sentence in sentences:
        unknown = sorted(set(sentence) - known)
        if unknown:
            raise ValueError(f"out of vocabulary: {unknown[0]!r}: add it to lexicon.txt")
        ngrams.update(_ngrams((START, *sentence, END), order))
    if not ngrams:
        raise ValueError("no sentences: need at least one to estimate a language model")
    return _arpa(_Counts([*sorted(known), END], ngrams), order)


def _ngrams(sentence: Ngram, order: int) -> Iterable[Ngram]:
    # The sentence start is a history only, never predicted.
    for end in range(2, len(sentence) + 1):
        for start in range(max(0, end - order), end):
            yield sentence[start:end]


def _arpa(counts: _Counts, order: int) -> str:
    # All words have a unigram, seen or not; longer n-grams are listed only if they occur.
    unigrams: list[Ngram] = [(START,), *((word,) for word in counts.vocabulary)]
    longer = [sorted(g for g in counts.ngrams if len(g) == n) for n in range(2, order + 1)]
    sections = [unigrams, *longer]
    lines = ["\\data\\", *(f"ngram {n}={len(s)}" for n, s in enumerate(sections, start=1))]
    for n, section in enumerate(sections, start=1):
        lines += ["", f"\\{n}-grams:", *(_arpa_line(counts, ngram) for ngram in section)]
    return "\n".join([*lines, "", "\\end\\", ""])


def _arpa_line(counts: _Counts, ngram: Ngram) -> str:
    probability = NEVER if ngram == (START,) else math.log10(counts.probability(ngram))
    line = f"{probability:.7f}\t{' '.join(ngram)}"
    if ngram in counts.histories and counts.histories[ngram].num_types:
        line += f"\t{math.log10(counts.histories[ngram].backoff_weight):.7f}"
    return line
