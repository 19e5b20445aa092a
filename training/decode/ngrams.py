"""Estimate n-gram models by modified Kneser-Ney or Witten-Bell smoothing; read and write ARPA text.

ARPA lists n-grams with log10 probabilities and back-off weights. Modified Kneser-Ney takes three
absolute discounts an order, interpolated: S. F. Chen, J. Goodman, "An empirical study of smoothing
techniques for language modeling", Computer Speech & Language 13(4), 1999, 4.2. Counts of n-grams
that begin with <s> are as in KenLM. Witten-Bell, interpolated too, leaves more for unseen words
after a history that many kinds of words follow.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from training.settings import MAX_ORDER

START, END = "<s>", "</s>"
UNKNOWN = ""
"""Takes the place of a word outside the vocabulary; no word of a text is empty."""

Ngram = tuple[str, ...]
Discounts = tuple[float, float, float, float]
"""What is subtracted from counts of none, of one, of two, and of three and more."""

NO_COUNTS: Discounts = (0.0, 0.5, 1.0, 1.5)
"""The discounts where no count occurs once, or none twice; KenLM's `--discount_fallback`."""


def count_ngrams(
    sentences: Iterable[Sequence[str]], vocabulary: Iterable[str], order: int
) -> list[Counter[Ngram]]:
    """Count the n-grams of up to `order` words; those of n words are element n - 1.

    N-grams end in a word or </s>, never in <s>. They may hold UNKNOWN, which no model predicts.
    Raises ValueError for other words outside the vocabulary, and for no sentences.
    """
    if order < 1:
        raise ValueError(f"order = {order}: need at least 1, a unigram")
    words = set(vocabulary)
    counts = [Counter[Ngram]() for _ in range(order)]
    for sentence in sentences:
        unknown = sorted(set(sentence) - words - {UNKNOWN})
        if unknown:
            raise ValueError(f"out of vocabulary: {unknown[0]!r}: add it to lexicon.txt")
        padded = (START, *sentence, END)
        # The sentence start is a history only, never predicted.
        for end in range(2, len(padded) + 1):
            for start in range(max(0, end - order), end):
                counts[end - start - 1][padded[start:end]] += 1
    if not counts[0]:
        raise ValueError("no sentences: need at least one to estimate a language model")
    return counts


def _known(counts: Mapping[Ngram, int]) -> dict[Ngram, int]:
    return {ngram: count for ngram, count in counts.items() if UNKNOWN not in ngram}


@dataclass(frozen=True, slots=True)
class _Order:
    """_Order: the counts a(hw) of n-grams of one length, their discounts, and N(h) and gamma(h)."""

    counts: Mapping[Ngram, int]
    discounts: Discounts
    totals: Mapping[Ngram, int]
    gammas: Mapping[Ngram, float]


def kneser_ney_arpa(
    sentences: Iterable[Sequence[str]], vocabulary: Collection[str], order: int
) -> str:
    """Return ARPA text of the n-gram model of `sentences`; words and errors as Witten-Bell's.

    a(hw) are `adjusted_counts`, and N(h) their sum; gamma(h) is the share that the discounts take.
    """
    counts = count_ngrams(sentences, vocabulary, order)
    orders = []
    for length in range(1, order + 1):
        adjusted = adjusted_counts(counts, length)
        discounts = discounts_of(adjusted)
        totals: Counter[Ngram] = Counter()
        taken: dict[Ngram, float] = {}
        for ngram, count in adjusted.items():
            history = ngram[:-1]
            totals[history] += count
            taken[history] = taken.get(history, 0.0) + discounts[min(count, 3)]
        gammas = {history: mass / totals[history] for history, mass in taken.items()}
        orders.append(_Order(adjusted, discounts, totals, gammas))
    return _interpolated_arpa(vocabulary, orders)


def adjusted_counts(counts: Sequence[Mapping[Ngram, int]], length: int) -> dict[Ngram, int]:
    """Return a(g) for n-grams of `length` words: how many different words precede g.

    The longest n-grams, and those that begin with <s>, which no word precedes, keep their counts.
    """
    own = counts[length - 1]
    if length == len(counts):
        return _known(own)
    adjusted = Counter(ngram[1:] for ngram in counts[length])
    adjusted.update({ngram: count for ngram, count in own.items() if ngram[0] == START})
    return _known(adjusted)


def discounts_of(adjusted: Mapping[Ngram, int]) -> Discounts:
    """Return D1, D2 and D3+ of one order by its counts of counts (equation 26).

    Where one of n1 to n4 is 0, or D2 or D3+ would not be above 0, all three are Kneser and Ney's
    own, n1 / (n1 + 2 n2); where n1 or n2 is 0, they are NO_COUNTS.
    """
    n1, n2, n3, n4 = (sum(count == times for count in adjusted.values()) for times in range(1, 5))
    if not (n1 and n2):
        return NO_COUNTS
    y = n1 / (n1 + 2 * n2)
    if n3 and n4:
        one, two, more = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
        if min(two, more) > 0:
            return 0.0, one, two, more
    # A 4-gram of 7 minutes (AN4) has perplexity 26.7 so, and 30.5 with NO_COUNTS.
    return 0.0, y, y, y


def witten_bell_arpa(
    sentences: Iterable[Sequence[str]], vocabulary: Collection[str], order: int = 3
) -> str:
    """Return ARPA text of the n-gram model of `sentences`; after each history P sums to one.

    P(w | h) = (c(hw) + T(h) P(w | shorter h)) / (N(h) + T(h)), where N counts tokens and T types
    after h. Words of `vocabulary` that never occur share the unigrams' unseen mass. Raises
    ValueError for words outside it, and for no sentences.
    """
    orders = []
    for counts in map(_known, count_ngrams(sentences, vocabulary, order)):
        types = Counter(ngram[:-1] for ngram in counts)
        totals = types.copy()
        for ngram, count in counts.items():
            totals[ngram[:-1]] += count
        gammas = {history: types[history] / totals[history] for history in types}
        orders.append(_Order(counts, (0.0, 0.0, 0.0, 0.0), totals, gammas))
    return _interpolated_arpa(vocabulary, orders)


def _interpolated_arpa(vocabulary: Collection[str], orders: Iterable[_Order]) -> str:
    """Return ARPA text of P(w | h) = (a(hw) - D(a(hw))) / N(h) + gamma(h) P(w | shorter h).

    Below unigrams P is uniform. gamma(h), the mass that unseen words have, is h's back-off weight.
    """
    unigrams: dict[Ngram, int] = {(word,): 0 for word in (*sorted(set(vocabulary)), END)}
    shorter: dict[Ngram, float] = {(): 1 / len(unigrams)}
    probabilities: list[dict[Ngram, float]] = []
    backoff_weights: dict[Ngram, float] = {}
    for length, each in enumerate(orders, start=1):
        # All words have a unigram, seen or not; longer n-grams are listed only if they occur.
        listed = {**unigrams, **each.counts} if length == 1 else each.counts
        # What follows a listed n-gram's first word is listed too, so one look-up interpolates.
        shorter = {
            ngram: (count - each.discounts[min(count, 3)]) / each.totals[ngram[:-1]]
            + each.gammas[ngram[:-1]] * shorter[ngram[1:]]
            for ngram, count in listed.items()
        }
        probabilities.append(shorter)
        backoff_weights |= each.gammas

    def line(ngram: Ngram, log_probability: float) -> str:
        weight = backoff_weights.get(ngram)
        backoff = "" if weight is None else f"\t{math.log10(weight):.7f}"
        return f"{log_probability:.7f}\t{' '.join(ngram)}{backoff}"

    sections = [
        [line(ngram, math.log10(found[ngram])) for ngram in (found if n == 0 else sorted(found))]
        for n, found in enumerate(probabilities)
    ]
    sections[0].insert(0, line((START,), _NEVER))  # a history alone
    return _arpa_text(sections)


MAX_LOG_BACKOFF = 100.0
"""The most that log10 of a back-off weight may be, either way: 1e39 has no float32."""

_NEVER = -99.0  # ARPA's log10 of zero


@dataclass(frozen=True, slots=True)
class ArpaEntry:
    """ArpaEntry is one line: log10 of a probability and, 0 if it has none, of its weight."""

    ngram: Ngram
    log_probability: float
    log_backoff: float


def _arpa_text(sections: Sequence[Sequence[str]]) -> str:
    """Return ARPA text; element n - 1 has the lines of the n-grams of n words."""
    lines = ["\\data\\", *(f"ngram {n}={len(each)}" for n, each in enumerate(sections, start=1))]
    for length, section in enumerate(sections, start=1):
        lines += ["", f"\\{length}-grams:", *section]
    return "\n".join([*lines, "", "\\end\\", ""])


def read_arpa(text: str, words: Collection[str] | None = None) -> list[ArpaEntry]:
    """Read ARPA text, in its order; ValueError names the line that is malformed, and a remedy.

    Where `words` are given, a word that is not one of them makes its line malformed.
    """
    lines = enumerate(text.splitlines(), start=1)
    if not any(line.strip() == "\\data\\" for _, line in lines):
        raise ValueError("not an ARPA language model: need \\data\\ ... \\end\\")
    declared: list[int] = []
    entries: dict[Ngram, ArpaEntry] = {}
    length, num_read = 0, 0
    for number, line in lines:
        fields, where = line.split(), f"ARPA line {number}: "
        if not fields:
            continue
        if line.startswith("\\") and len(fields) == 1:
            if length and num_read != declared[length - 1]:
                raise ValueError(
                    f"{where}{num_read} {length}-grams end here: need the {declared[length - 1]} "
                    "that \\data\\ declares: write or copy the file again"
                )
            wanted = f"\\{length + 1}-grams:" if length < len(declared) else "\\end\\"
            if fields[0] == "\\end\\":
                if not declared or length != len(declared):
                    need = f"need the n-grams of lengths 1..{max(len(declared), 1)} before it"
                    raise ValueError(f"{where}\\end\\: {need}")
                return list(entries.values())
            if fields[0] != wanted:
                raise ValueError(f"{where}{_shown(line)}: need {wanted} here")
            length, num_read = length + 1, 0
            continue
        try:
            if length == 0:
                declared.append(_declared_count(line, len(declared) + 1))
            else:
                entry = _entry(fields, length, entries, words)
                entries[entry.ngram] = entry
                num_read += 1
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error
    raise ValueError("ARPA text ends without \\end\\: it was cut off: write or copy it again")


def _declared_count(line: str, length: int) -> int:
    name, _, count = line.partition("=")
    is_count = count.strip().isdecimal() and count.isascii() and len(count) < 16
    if length > MAX_ORDER or name.split() != ["ngram", str(length)] or not is_count:
        need = f"need `ngram {length}=COUNT`, of lengths 1..{MAX_ORDER} in order"
        raise ValueError(f"{_shown(line)}: {need}")
    return int(count)


def _entry(
    fields: list[str],
    length: int,
    entries: Mapping[Ngram, ArpaEntry],
    words: Collection[str] | None,
) -> ArpaEntry:
    """Read a line's fields; ValueError too for an n-gram that is listed, or lacks its history."""
    ngram = tuple(fields[1 : length + 1])
    try:
        log_probability = float(fields[0])
        log_backoff = float(fields[length + 1]) if len(fields) == length + 2 else 0.0
    except ValueError as error:
        raise ValueError("need log10 probabilities") from error
    if len(fields) not in (length + 1, length + 2):
        raise ValueError(
            f"{len(fields)} fields: need a probability and {length} words, and a back-off weight "
            "or none"
        )
    if not (abs(log_backoff) <= MAX_LOG_BACKOFF and -math.inf < log_probability <= 0):
        bounds = f"{-MAX_LOG_BACKOFF:g} to {MAX_LOG_BACKOFF:g}"
        need = f"need a finite log10 probability of at most 0, and a back-off weight of {bounds}"
        raise ValueError(f"{fields[0]} and {log_backoff:g}: {need}")
    shown = _shown(" ".join(ngram))
    if START in ngram[1:] or END in ngram[:-1]:
        raise ValueError(f"{shown}: need {START} first and {END} last only")
    if ngram in entries:
        raise ValueError(f"{shown}: there twice: remove one")
    if length > 1 and ngram[:-1] not in entries:
        raise ValueError(f"{shown}: its history has no entry: list the shorter n-gram too")
    for word in ngram:
        if words is not None and word not in words and word not in (START, END):
            raise ValueError(f"{word!r} is not in lexicon.txt: add it")
    return ArpaEntry(ngram, log_probability, log_backoff)


def _shown(text: str) -> str:
    return ascii(text[:60])


@dataclass(frozen=True, slots=True)
class RestrictedArpa:
    """RestrictedArpa is ARPA text over a lexicon's words, and counts what that changed.

    `num_dropped_words` words and `num_dropped_ngrams` n-grams hold words outside the lexicon.
    `num_missing_words` words of the lexicon are not in the model, so no hypothesis has them.
    """

    text: str
    num_dropped_words: int
    num_dropped_ngrams: int
    num_missing_words: int


def restrict_arpa(text: str, words: Collection[str]) -> RestrictedArpa:
    """Drop all n-grams with words outside `words`; the others keep their probabilities.

    ValueError for malformed text, and where no word or no sentence end is left.
    """
    entries = read_arpa(text)
    known = {*words, START, END}
    kept = [entry for entry in entries if known.issuperset(entry.ngram)]
    listed = {entry.ngram[0] for entry in kept if len(entry.ngram) == 1}
    if END not in listed:
        raise ValueError(f"the ARPA language model has no unigram {END}: need it to end sentences")
    if not listed - {START, END}:
        remedy = "need the lexicon's spelling, capitals too"
        raise ValueError(f"the ARPA language model has no word of lexicon.txt: {remedy}")
    # The shortest text of a number reads as the same number.
    sections: list[list[str]] = [[] for _ in range(max(len(entry.ngram) for entry in kept))]
    for e in kept:
        sections[len(e.ngram) - 1].append(
            f"{e.log_probability}\t{' '.join(e.ngram)}\t{e.log_backoff}"
        )
    unigrams = sum(len(entry.ngram) == 1 for entry in entries)
    return RestrictedArpa(
        _arpa_text(sections),
        num_dropped_words=unigrams - len(listed),
        num_dropped_ngrams=len(entries) - len(kept),
        num_missing_words=len(set(words) - listed),
    )
