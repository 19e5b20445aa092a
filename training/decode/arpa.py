"""Count n-grams over a closed vocabulary; write, read and check models as ARPA text.

ARPA lists n-grams with log10 probabilities and back-off weights.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from training.settings.values import MAX_ORDER

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


MAX_LOG_BACKOFF = 100.0
"""The most that log10 of a back-off weight may be, either way: 1e39 has no float32."""

_NEVER = -99.0  # ARPA's log10 of zero
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class NgramModel:
    """NgramModel: P of the listed n-grams by length, and the back-off weights of histories.

    A word that is not listed after a history has the weight times its P after the shorter one.
    """

    probabilities: tuple[Mapping[Ngram, float], ...]
    backoff_weights: Mapping[Ngram, float]


@dataclass(frozen=True, slots=True)
class ArpaEntry:
    """ArpaEntry is one line: log10 of a probability and, 0 if it has none, of its weight."""

    ngram: Ngram
    log_probability: float
    log_backoff: float


def write_arpa(model: NgramModel) -> str:
    """Return the ARPA text of a model; <s> is listed first, as a history alone."""
    unigrams, *longer = model.probabilities
    sections = [[(START,), *unigrams], *map(sorted, longer)]
    lines = _head(sections)
    for length, section in enumerate(sections, start=1):
        lines += ["", f"\\{length}-grams:", *(_line(model, ngram) for ngram in section)]
    return "\n".join([*lines, "", "\\end\\", ""])


def _head(sections: Sequence[Sequence[object]]) -> list[str]:
    return ["\\data\\", *(f"ngram {n}={len(each)}" for n, each in enumerate(sections, start=1))]


def _line(model: NgramModel, ngram: Ngram) -> str:
    is_start = ngram == (START,)
    log = _NEVER if is_start else math.log10(model.probabilities[len(ngram) - 1][ngram])
    weight = model.backoff_weights.get(ngram)
    backoff = "" if weight is None else f"\t{math.log10(weight):.7f}"
    return f"{log:.7f}\t{' '.join(ngram)}{backoff}"


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
        fields = line.split()
        if not fields:
            continue
        if line.startswith("\\") and len(fields) == 1:
            _require_complete(number, length, num_read, declared)
            if line.strip() == "\\end\\":
                _require_all(number, length, declared)
                return list(entries.values())
            length, num_read = _next_length(number, line, length, declared), 0
        elif length == 0:
            declared.append(_declared_count(number, line, len(declared) + 1))
        else:
            entry = _entry(number, fields, length, entries)
            _require_known(number, entry.ngram, words)
            entries[entry.ngram] = entry
            num_read += 1
    raise ValueError("ARPA text ends without \\end\\: it was cut off: write or copy it again")


def _declared_count(number: int, line: str, length: int) -> int:
    name, _, count = line.partition("=")
    if length > MAX_ORDER or name.split() != ["ngram", str(length)] or not _is_count(count):
        need = f"need `ngram {length}=COUNT`, of lengths 1..{MAX_ORDER} in order"
        raise ValueError(f"ARPA line {number}: {_shown(line)}: {need}")
    return int(count)


def _is_count(text: str) -> bool:
    return text.strip().isdecimal() and text.isascii() and len(text) < 16


def _next_length(number: int, line: str, length: int, declared: Sequence[int]) -> int:
    if length == len(declared) or line.strip() != f"\\{length + 1}-grams:":
        wanted = f"\\{length + 1}-grams:" if length < len(declared) else "\\end\\"
        raise ValueError(f"ARPA line {number}: {_shown(line)}: need {wanted} here")
    return length + 1


def _require_complete(number: int, length: int, num_read: int, declared: Sequence[int]) -> None:
    if length and num_read != declared[length - 1]:
        raise ValueError(
            f"ARPA line {number}: {num_read} {length}-grams end here: need the "
            f"{declared[length - 1]} that \\data\\ declares: write or copy the file again"
        )


def _require_all(number: int, length: int, declared: Sequence[int]) -> None:
    if not declared or length != len(declared):
        need = f"need the n-grams of lengths 1..{max(len(declared), 1)} before it"
        raise ValueError(f"ARPA line {number}: \\end\\: {need}")


def _entry(
    number: int, fields: list[str], length: int, entries: Mapping[Ngram, ArpaEntry]
) -> ArpaEntry:
    ngram = tuple(fields[1 : length + 1])
    try:
        log_probability = float(fields[0])
        log_backoff = float(fields[length + 1]) if len(fields) == length + 2 else 0.0
    except ValueError as error:
        raise ValueError(f"ARPA line {number}: need log10 probabilities") from error
    if len(fields) not in (length + 1, length + 2):
        raise ValueError(
            f"ARPA line {number}: {len(fields)} fields: need a probability and {length} words, "
            "and a back-off weight or none"
        )
    if not (abs(log_backoff) <= MAX_LOG_BACKOFF and -math.inf < log_probability <= 0):
        value = f"{fields[0]} and {log_backoff:g}"
        bounds = f"{-MAX_LOG_BACKOFF:g} to {MAX_LOG_BACKOFF:g}"
        need = f"need a finite log10 probability of at most 0, and a back-off weight of {bounds}"
        raise ValueError(f"ARPA line {number}: {value}: {need}")
    _require_place(number, ngram, entries)
    return ArpaEntry(ngram, log_probability, log_backoff)


def _require_place(number: int, ngram: Ngram, entries: Mapping[Ngram, ArpaEntry]) -> None:
    """Refuse an n-gram that is there already, lacks its history, or runs past a sentence's ends."""
    shown = _shown(" ".join(ngram))
    if START in ngram[1:] or END in ngram[:-1]:
        raise ValueError(f"ARPA line {number}: {shown}: need {START} first and {END} last only")
    if ngram in entries:
        raise ValueError(f"ARPA line {number}: {shown}: there twice: remove one")
    if len(ngram) > 1 and ngram[:-1] not in entries:
        raise ValueError(
            f"ARPA line {number}: {shown}: its history has no entry: list the shorter n-gram too"
        )


def _require_known(number: int, ngram: Ngram, words: Collection[str] | None) -> None:
    unknown = [word for word in ngram if words is not None and word not in words]
    unknown = [word for word in unknown if word not in (START, END)]
    if unknown:
        raise ValueError(f"ARPA line {number}: {unknown[0]!r} is not in lexicon.txt: add it")


def _shown(text: str) -> str:
    return ascii(text[:_MAX_SHOWN])


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
    unigrams = sum(len(entry.ngram) == 1 for entry in entries)
    return RestrictedArpa(
        _text_of(kept),
        num_dropped_words=unigrams - len(listed),
        num_dropped_ngrams=len(entries) - len(kept),
        num_missing_words=len(set(words) - listed),
    )


def _text_of(entries: Sequence[ArpaEntry]) -> str:
    order = max(len(entry.ngram) for entry in entries)
    sections = [[e for e in entries if len(e.ngram) == n] for n in range(1, order + 1)]
    lines = _head(sections)
    for length, section in enumerate(sections, start=1):
        lines += ["", f"\\{length}-grams:"]
        # The shortest text of a number reads as the same number.
        lines += [f"{e.log_probability}\t{' '.join(e.ngram)}\t{e.log_backoff}" for e in section]
    return "\n".join([*lines, "", "\\end\\", ""])
