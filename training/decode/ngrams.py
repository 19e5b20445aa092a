"""Hold back-off n-gram models in arrays; estimate them by modified Kneser-Ney or Witten-Bell.

Modified Kneser-Ney takes three absolute discounts an order, interpolated: S. F. Chen, J. Goodman,
"An empirical study of smoothing techniques for language modeling", Computer Speech & Language
13(4), 1999, 4.2. Counts of n-grams that begin with <s> are as in KenLM. Witten-Bell, interpolated
too, leaves more for unseen words after a history that many kinds of words follow.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from training.decode.lexicon import UNKNOWN

START, END = "<s>", "</s>"

NEVER = -99.0
"""ARPA's log10 of zero."""

NGRAM = np.dtype(
    [
        ("history", "<i4"),  # the n-gram without its last word, by its index
        ("word", "<i4"),  # the last word
        ("log_probability", "<f8"),  # log10 of P(word | history)
        ("log_backoff", "<f8"),  # log10 of the weight by which it backs off as a history
    ]
)


class Ngram(NamedTuple):
    """Ngram is one of a model: words, log10 of its probability, and of its back-off weight."""

    ngram: tuple[str, ...]
    log_probability: float
    log_backoff: float


@dataclass(frozen=True, slots=True, eq=False)
class BackoffModel:
    """BackoffModel is a trie of n-grams (NGRAM): by length, then by history, then by word.

    Element 0 is the empty n-gram. Those of n words begin at `starts[n]`, and `starts` ends with the
    number of all. All `words`, which are in alphabetical order, have a unigram: that of words[w] is
    element 1 + w. The words that may follow an n-gram are a range, see `continuations`.
    """

    words: tuple[str, ...]
    ngrams: np.ndarray
    starts: tuple[int, ...]

    @property
    def order(self) -> int:
        """Return the number of words of the longest n-grams."""
        return len(self.starts) - 2

    def of_length(self, length: int) -> slice:
        """Return where the n-grams of `length` words are."""
        return slice(self.starts[length], self.starts[length + 1])

    def continuations(self) -> np.ndarray:
        """Return first, one element more than n-grams: those of history h are first[h:h + 2]."""
        return np.searchsorted(self.ngrams["history"], np.arange(len(self.ngrams) + 1))

    def suffixes(self) -> np.ndarray:
        """Return the longest listed proper suffix of each n-gram, to which it backs off.

        The empty n-gram is that of all unigrams, and its own.
        """
        suffixes = np.zeros(len(self.ngrams), np.int32)
        keys = ngram_keys(self.ngrams["history"], self.ngrams["word"], len(self.words))
        for length in range(2, self.order + 1):
            rows = np.arange(self.starts[length], self.starts[length + 1])
            states = suffixes[self.ngrams["history"][rows]]
            # Every word has a unigram, so the search ends at the empty history at the latest.
            while len(rows):
                wanted = ngram_keys(states, self.ngrams["word"][rows], len(self.words))
                found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
                is_found = keys[found] == wanted
                suffixes[rows[is_found]] = found[is_found]
                rows, states = rows[~is_found], suffixes[states[~is_found]]
        return suffixes

    def backed_off(self, suffixes: np.ndarray, length: int) -> np.ndarray:
        """Return log10 P(w | h less its first word) of all n-grams hw of `length` words, 2 or more.

        `suffixes` are those of the model.
        """
        some, history = self.of_length(length), self.ngrams["history"]
        targets, states = suffixes[some], suffixes[history[some]]
        log_probabilities: np.ndarray = self.ngrams["log_probability"][targets]
        while len(rows := np.flatnonzero(states != history[targets])):
            log_probabilities[rows] += self.ngrams["log_backoff"][states[rows]]
            states[rows] = suffixes[states[rows]]
        return log_probabilities

    def as_searched(self) -> "BackoffModel":
        """Return the model whose n-grams cost what a search takes them for.

        It goes through back-off arcs also where an n-gram is listed, and takes the cheaper way. So
        an n-gram that is dearer than its back-off goes, or as a history costs as much. Interpolated
        models have none; pruned ones, and those of Katz or Good and Turing, may.
        """
        suffixes, model = self.suffixes(), replace(self, ngrams=self.ngrams.copy())
        is_kept = np.ones(len(self.ngrams), np.bool_)
        is_history = np.bincount(self.ngrams["history"][1:], minlength=len(self.ngrams)) > 0
        for length in range(2, self.order + 1):
            some = model.ngrams[self.of_length(length)]  # a view
            backed = self.ngrams["log_backoff"][some["history"]] + model.backed_off(
                suffixes, length
            )
            is_kept[self.of_length(length)] &= some["log_probability"] > backed
            some["log_probability"] = np.maximum(some["log_probability"], backed)
        return model.restricted_to(is_kept | is_history)

    def restricted_to(self, is_kept: np.ndarray) -> "BackoffModel":
        """Keep some n-grams, with their histories; words of dropped unigrams leave the model."""
        new_index = np.cumsum(is_kept, dtype=np.int32) - 1
        of_words = is_kept[self.of_length(1)]
        ngrams = self.ngrams[is_kept]
        ngrams["history"][1:] = new_index[ngrams["history"][1:]]
        ngrams["word"][1:] = (np.cumsum(of_words, dtype=np.int32) - 1)[ngrams["word"][1:]]
        words = tuple(word for word, kept in zip(self.words, of_words, strict=True) if kept)
        starts = (int(is_kept[:start].sum()) for start in self.starts)
        return BackoffModel(words, ngrams, tuple(starts))

    def __iter__(self) -> Iterator[Ngram]:
        """Yield all n-grams but the empty one as words, in order."""
        texts: list[tuple[str, ...]] = [()]
        for history, word, probability, backoff in self.ngrams[1:].tolist():
            texts.append((*texts[history], self.words[word]))
            yield Ngram(texts[-1], probability, backoff)


def ngram_keys(histories: np.ndarray, words: np.ndarray, num_words: int) -> np.ndarray:
    """Return a number for each n-gram; they are in the order of the n-grams."""
    keys: np.ndarray = histories.astype(np.int64) * num_words + words
    return keys


EMPTY = np.array([(-1, -1, 0.0, 0.0)], NGRAM)
"""The empty n-gram, which is no continuation of itself."""


def backoff_model(words: tuple[str, ...], lengths: Iterable[np.ndarray]) -> BackoffModel:
    """Join the n-grams of each length (NGRAM), whose histories are rows of the length before."""
    joined, starts = [EMPTY], [0, 1]
    for ngrams in lengths:
        ngrams["history"] += starts[-2]
        joined.append(ngrams)
        starts.append(starts[-1] + len(ngrams))
    return BackoffModel(words, np.concatenate(joined), tuple(starts))


Discounts = tuple[float, float, float, float]
"""What is subtracted from counts of none, of one, of two, and of three and more."""

NO_COUNTS: Discounts = (0.0, 0.5, 1.0, 1.5)
"""The discounts where no count occurs once, or none twice; KenLM's `--discount_fallback`."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """_Counted: all n-grams of one length that occur, by row; they are in the order of the model.

    `histories` and `suffixes` are rows of n-grams one word shorter: without the last and without
    the first word. Unigrams are the words, known and unknown, also those that never occur.
    """

    histories: np.ndarray
    words: np.ndarray
    suffixes: np.ndarray
    counts: np.ndarray
    begins_sentence: np.ndarray
    is_known: np.ndarray  # holds no unknown word


def _count(sentences: Iterable[Sequence[str]], words: Sequence[str], order: int) -> list[_Counted]:
    """Count the n-grams of up to `order` words; those of n words are element n - 1.

    N-grams end in a word or </s>, never in <s>. They may hold UNKNOWN, which no model predicts.
    Raises ValueError for other words outside the vocabulary, and for no sentences.
    """
    if order < 1:
        raise ValueError(f"order = {order}: need at least 1, a unigram")
    ids = {word: number for number, word in enumerate((*words, UNKNOWN))}
    start, num_ids = ids[START], len(ids)
    encoded = array("i")
    for sentence in sentences:
        try:
            encoded.extend([start, *map(ids.__getitem__, sentence), ids[END]])
        except KeyError as error:
            raise ValueError(
                f"out of vocabulary: {error.args[0]!r}: add it to lexicon.txt"
            ) from error
    if not encoded:
        raise ValueError("no sentences: need at least one to estimate a language model")
    tokens = np.frombuffer(encoded, np.int32)
    numbers = np.arange(num_ids)
    # The sentence start is a history only, never predicted.
    counts = np.bincount(tokens, minlength=num_ids)
    counts[start] = 0
    none = np.zeros(num_ids, np.int64)
    levels = [_Counted(none, numbers, none, counts, numbers == start, numbers < len(words))]
    positions, rows = np.arange(len(tokens)), tokens  # where n-grams begin, and which they are
    for length in range(2, order + 1):
        positions = positions[: np.searchsorted(positions, len(tokens) - length + 1)]
        positions = positions[tokens[positions + length - 1] != start]
        keys = rows[positions].astype(np.int64) * num_ids + tokens[positions + length - 1]
        unique, first, row, counts = np.unique(
            keys, return_index=True, return_inverse=True, return_counts=True
        )
        histories, last = np.divmod(unique, num_ids)
        levels.append(
            _Counted(
                histories=histories,
                words=last,
                suffixes=rows[positions[first] + 1],
                counts=counts,
                begins_sentence=levels[-1].begins_sentence[histories],
                is_known=levels[-1].is_known[histories] & (last < len(words)),
            )
        )
        rows = np.zeros(len(tokens), np.int32)
        rows[positions] = row
    return levels


def kneser_ney(
    sentences: Iterable[Sequence[str]],
    vocabulary: Collection[str],
    order: int,
    min_counts: Sequence[int] = (),
) -> BackoffModel:
    """Estimate the n-gram model of `sentences`; arguments and errors as Witten-Bell's.

    a(hw) are the adjusted counts: how many different words precede hw. The longest n-grams, and
    those that begin with <s>, which no word precedes, keep their counts.
    """
    words = _words(vocabulary)
    levels = _count(sentences, words, order)
    estimates = []
    for level, longer in zip(levels, [*levels[1:], None], strict=True):
        adjusted = level.counts
        if longer is not None:
            preceded = np.bincount(longer.suffixes, minlength=len(adjusted))
            adjusted = np.where(level.begins_sentence, adjusted, preceded)
        adjusted = np.where(level.is_known, adjusted, 0)
        discounts = np.array(discounts_of(adjusted))[np.minimum(adjusted, 3)]
        estimates.append(_Estimate(adjusted, discounts, np.zeros(len(adjusted))))
    return _interpolated(words, levels, estimates, min_counts)


def discounts_of(adjusted: np.ndarray) -> Discounts:
    """Return D1, D2 and D3+ of one order by its counts of counts (equation 26).

    Where one of n1 to n4 is 0, or D2 or D3+ would not be above 0, all three are Kneser and Ney's
    own, n1 / (n1 + 2 n2); where n1 or n2 is 0, they are NO_COUNTS.
    """
    n1, n2, n3, n4 = (int((adjusted == times).sum()) for times in range(1, 5))
    if not (n1 and n2):
        return NO_COUNTS
    y = n1 / (n1 + 2 * n2)
    if n3 and n4:
        one, two, more = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
        if min(two, more) > 0:
            return 0.0, one, two, more
    # A 4-gram of 7 minutes (AN4) has perplexity 26.7 so, and 30.5 with NO_COUNTS.
    return 0.0, y, y, y


def witten_bell(
    sentences: Iterable[Sequence[str]],
    vocabulary: Collection[str],
    order: int,
    min_counts: Sequence[int] = (),
) -> BackoffModel:
    """Estimate the n-gram model of `sentences`; after each history P sums to one.

    P(w | h) = (c(hw) + T(h) P(w | shorter h)) / (N(h) + T(h)), where N counts tokens and T types
    after h. Words of `vocabulary` that never occur share the unigrams' unseen mass. An n-gram of n
    words that occurs less than min_counts[n - 1] times is not listed, and leaves its mass to
    shorter n-grams; the last element holds for all longer ones. As in KenLM, whose `--prune` has
    one less, counts are those of the text, and discounts those of all n-grams. Raises ValueError
    for words outside the vocabulary, and for no sentences.
    """
    words = _words(vocabulary)
    levels = _count(sentences, words, order)
    estimates = []
    for level in levels:
        counts = np.where(level.is_known, level.counts, 0)
        estimates.append(_Estimate(counts, np.zeros(len(counts)), (counts > 0).astype(float)))
    return _interpolated(words, levels, estimates, min_counts)


def _words(vocabulary: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*vocabulary, START, END}))


@dataclass(frozen=True, slots=True)
class _Estimate:
    """_Estimate: for each n-gram of one length a(hw), what is taken of it, and what it adds to T.

    a(hw) is 0 where an unknown word is within.
    """

    counts: np.ndarray
    discounts: np.ndarray
    types: np.ndarray


def _interpolated(
    words: tuple[str, ...],
    levels: Sequence[_Counted],
    estimates: Sequence[_Estimate],
    min_counts: Sequence[int],
) -> BackoffModel:
    """Return the model of P(w | h) = (a(hw) - D) / (N(h) + T(h)) + gamma(h) P(w | shorter h).

    Below unigrams P is uniform. gamma(h), the mass that unlisted words have, is h's back-off
    weight: T(h), all D after h, and all a of n-grams that are not listed.
    """
    least = _least_counts(min_counts, len(levels))
    start = words.index(START)
    shorter = np.array([1 / (len(words) - 1)])
    is_kept, lengths = np.ones(1, bool), [EMPTY.copy()]
    for level, each, min_count in zip(levels, estimates, least, strict=True):
        # All words have a unigram, seen or not; longer n-grams are listed only if they occur.
        is_listed = level.is_known & (level.counts >= min_count)
        taken = each.types + np.where(is_listed, each.discounts, each.counts)
        num_histories = len(shorter)
        totals = np.bincount(level.histories, each.counts + each.types, num_histories)
        masses = np.bincount(level.histories, taken, num_histories)
        gammas = np.divide(masses, totals, out=np.ones(num_histories), where=totals > 0)
        lengths[-1]["log_backoff"] = np.log10(gammas[is_kept])
        # What follows a listed n-gram's first word is listed too, so one look-up interpolates.
        own = (each.counts - each.discounts) / np.maximum(totals[level.histories], 1)
        shorter = own + gammas[level.histories] * shorter[level.suffixes]
        ngrams = np.zeros(int(is_listed.sum()), NGRAM)
        ngrams["history"] = (np.cumsum(is_kept) - 1)[level.histories[is_listed]]
        ngrams["word"] = level.words[is_listed]
        ngrams["log_probability"] = np.log10(shorter[is_listed])
        if len(lengths) == 1:
            ngrams["log_probability"][start] = NEVER  # a history alone
        is_kept = is_listed
        lengths.append(ngrams)
    return backoff_model(words, lengths[1:])


def _least_counts(min_counts: Sequence[int], order: int) -> list[int]:
    """Return the least count of each length, which is 0 for unigrams."""
    least = [*min_counts[:order]] or [1]
    assert least[0] == 1, "all words have a unigram"
    assert least == sorted(least), "a history is no rarer than what it begins"
    return [0, *least[1:], *least[-1:] * (order - len(least))]


def arpa_lines(model: BackoffModel) -> Iterator[str]:
    """Yield the lines of ARPA text, in the order of the model."""
    yield "\\data\\"
    for length in range(1, model.order + 1):
        of_length = model.of_length(length)
        yield f"ngram {length}={of_length.stop - of_length.start}"
    has_weight = (np.diff(model.continuations()) > 0) | (model.ngrams["log_backoff"] != 0)
    length = 0
    for each, weighs in zip(model, has_weight[1:].tolist(), strict=True):
        while length < len(each.ngram):
            length += 1
            yield from ("", f"\\{length}-grams:")
        weight = f"\t{each.log_backoff:.7f}" if weighs else ""
        yield f"{each.log_probability:.7f}\t{' '.join(each.ngram)}{weight}"
    for empty in range(length + 1, model.order + 1):
        yield from ("", f"\\{empty}-grams:")
    yield from ("", "\\end\\")


def arpa_text(model: BackoffModel) -> str:
    """Return the ARPA text of a model."""
    return "".join(f"{line}\n" for line in arpa_lines(model))
