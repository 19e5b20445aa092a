"""Estimate n-gram models by modified Kneser-Ney or by Witten-Bell smoothing, as ARPA text.

Modified Kneser-Ney takes three absolute discounts an order, interpolated: S. F. Chen, J. Goodman,
"An empirical study of smoothing techniques for language modeling", Computer Speech & Language
13(4), 1999, 4.2. Counts of n-grams that begin with <s> are as in KenLM. Witten-Bell, interpolated
too, leaves more for unseen words after a history that many kinds of words follow.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from training.decode.arpa import (
    START,
    Ngram,
    NgramCounts,
    NgramModel,
    count_ngrams,
    without_unknown,
    write_arpa,
)


@dataclass(frozen=True, slots=True)
class Discounts:
    """Discounts: what is subtracted from counts of one, of two, and of three and more."""

    one: float
    two: float
    more: float

    def of(self, count: int) -> float:
        """Return the discount of a count; none of 0."""
        return (0.0, self.one, self.two, self.more)[min(count, 3)]


NO_COUNTS = Discounts(0.5, 1.0, 1.5)
"""The discounts where no count occurs once, or none twice; KenLM's `--discount_fallback`."""


def kneser_ney_arpa(
    sentences: Iterable[Sequence[str]], vocabulary: Iterable[str], order: int
) -> str:
    """Return ARPA text of the n-gram model of `sentences`; words and errors as Witten-Bell's."""
    return write_arpa(kneser_ney(count_ngrams(sentences, vocabulary, order)))


def kneser_ney(counts: NgramCounts) -> NgramModel:
    """Return P(w | h) = (a(hw) - D(a(hw))) / a(h) + gamma(h) P(w | shorter h), lowest order first.

    Below unigrams P is uniform. gamma(h), the mass that the discounts leave, is the back-off
    weight of h.
    """
    unigrams = {(word,): 0 for word in counts.vocabulary}
    shorter: dict[Ngram, float] = {(): 1 / len(unigrams)}
    probabilities: list[dict[Ngram, float]] = []
    backoff_weights: dict[Ngram, float] = {}
    for length in range(1, len(counts.by_length) + 1):
        adjusted = adjusted_counts(counts, length)
        discounts = discounts_of(adjusted)
        totals, gammas = _totals(adjusted), _discounted_shares(adjusted, discounts)
        # All words have a unigram, seen or not; longer n-grams are listed only if they occur.
        listed = {**unigrams, **adjusted} if length == 1 else adjusted
        backoff_weights |= gammas
        # What follows a listed n-gram's first word is listed too, so one look-up interpolates.
        shorter = {
            ngram: (count - discounts.of(count)) / totals[ngram[:-1]]
            + gammas[ngram[:-1]] * shorter[ngram[1:]]
            for ngram, count in listed.items()
        }
        probabilities.append(shorter)
    # Unigrams back off to the uniform distribution, which is already in them.
    del backoff_weights[()]
    return NgramModel(tuple(probabilities), backoff_weights)


def adjusted_counts(counts: NgramCounts, length: int) -> Counter[Ngram]:
    """Return a(g) for the n-grams of so many words: in how many different words' wake g occurs.

    The longest n-grams, and those that begin with <s>, which no word precedes, keep their counts.
    """
    own = counts.by_length[length - 1]
    if length == len(counts.by_length):
        return without_unknown(own)
    adjusted = Counter(ngram[1:] for ngram in counts.by_length[length])
    adjusted.update({ngram: count for ngram, count in own.items() if ngram[0] == START})
    return without_unknown(adjusted)


def discounts_of(adjusted: Counter[Ngram]) -> Discounts:
    """Return D1, D2 and D3+ of one order by its counts of counts (equation 26).

    Where one of n1 to n4 is 0, or D2 or D3+ would not be above 0, all three are Kneser and Ney's
    own, n1 / (n1 + 2 n2); where n1 or n2 is 0, they are NO_COUNTS.
    """
    n1, n2, n3, n4 = (sum(count == times for count in adjusted.values()) for times in range(1, 5))
    if not (n1 and n2):
        return NO_COUNTS
    y = n1 / (n1 + 2 * n2)
    if n3 and n4:
        found = Discounts(1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        if min(found.two, found.more) > 0:
            return found
    # A 4-gram of 7 minutes (AN4) has perplexity 26.7 so, and 30.5 with NO_COUNTS.
    return Discounts(y, y, y)


def _totals(adjusted: Counter[Ngram]) -> dict[Ngram, int]:
    totals: dict[Ngram, int] = defaultdict(int)
    for ngram, count in adjusted.items():
        totals[ngram[:-1]] += count
    return totals


def _discounted_shares(adjusted: Counter[Ngram], discounts: Discounts) -> dict[Ngram, float]:
    """Return gamma(h): the share of the counts after h that the discounts take."""
    taken: dict[Ngram, float] = defaultdict(float)
    for ngram, count in adjusted.items():
        taken[ngram[:-1]] += discounts.of(count)
    totals = _totals(adjusted)
    return {history: mass / totals[history] for history, mass in taken.items()}


def witten_bell_arpa(
    sentences: Iterable[Sequence[str]], vocabulary: Iterable[str], order: int = 3
) -> str:
    """Return ARPA text of the n-gram model of `sentences`; after each history P sums to one.

    Words of `vocabulary` that never occur share the unigrams' unseen mass. Raises ValueError for
    words outside it, and for no sentences.
    """
    return write_arpa(witten_bell(count_ngrams(sentences, vocabulary, order)))


def witten_bell(counts: NgramCounts) -> NgramModel:
    """Return P(w | h) = (c(hw) + T(h) P(w | shorter h)) / (N(h) + T(h)), lowest order first.

    N counts tokens and T types after h; below unigrams P is uniform. T / (N + T) is the back-off
    weight of h.
    """
    unigrams = {(word,): 0 for word in counts.vocabulary}
    shorter: dict[Ngram, float] = {(): 1 / len(unigrams)}
    probabilities: list[dict[Ngram, float]] = []
    backoff_weights: dict[Ngram, float] = {}
    for length, with_unknown in enumerate(counts.by_length, start=1):
        seen = without_unknown(with_unknown)
        tokens: Counter[Ngram] = Counter()
        for ngram, count in seen.items():
            tokens[ngram[:-1]] += count
        types = Counter(ngram[:-1] for ngram in seen)
        backoff_weights |= {h: types[h] / (tokens[h] + types[h]) for h in types}
        # All words have a unigram, seen or not; longer n-grams are listed only if they occur.
        listed = {**unigrams, **seen} if length == 1 else seen
        shorter = {
            ngram: (count + types[ngram[:-1]] * shorter[ngram[1:]])
            / (tokens[ngram[:-1]] + types[ngram[:-1]])
            for ngram, count in listed.items()
        }
        probabilities.append(shorter)
    # Unigrams back off to the uniform distribution, which is already in them.
    del backoff_weights[()]
    return NgramModel(tuple(probabilities), backoff_weights)
