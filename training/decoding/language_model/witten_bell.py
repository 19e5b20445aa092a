"""Witten-Bell: what follows a history in many kinds leaves much for unseen words, interpolated."""

from collections import Counter
from collections.abc import Iterable, Sequence

from training.decoding.language_model.arpa import NgramModel, write_arpa
from training.decoding.language_model.ngrams import (
    Ngram,
    NgramCounts,
    count_ngrams,
    without_unknown,
)


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
