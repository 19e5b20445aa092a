"""Read ARPA text: n-grams with log10 probabilities and back-off weights, by length."""

import re
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from training.decode.ngrams import END, NGRAM, START, BackoffModel, backoff_model, ngram_keys
from training.settings import MAX_ORDER

MAX_LOG = 100.0
"""The most that log10 of a probability or a back-off weight may be, either way.

1e39 has no float32, and determinization does not end with costs of 1e38. ARPA's zero is -99.
"""


def read_arpa(lines: Iterable[str]) -> BackoffModel:
    """Read the lines of ARPA text; ValueError names the line that is malformed, and a remedy.

    Histories and last words of n-grams must be listed too.
    """
    numbered = enumerate(lines, start=1)
    if not any(line.strip() == "\\data\\" for _, line in numbered):
        raise ValueError("not an ARPA language model: need \\data\\ ... \\end\\")
    declared: list[int] = []
    words: dict[str, int] = {}
    section = _Section(0, words)
    lengths: list[np.ndarray] = []
    for number, line in numbered:
        # Words may hold other blanks than these, such as a no-break space.
        fields = line.split() if line.isascii() else _BLANKS.split(line.strip(" \t\r\n"))
        if not any(fields):
            continue
        try:
            if line.startswith("\\") and len(fields) == 1:
                lengths += section.ended(declared, lengths)
                if fields[0] == "\\end\\":
                    _require_all_lengths(declared, len(lengths))
                    return backoff_model(tuple(words), lengths)
                length = len(lengths) + 1
                wanted = f"\\{length}-grams:" if length <= len(declared) else "\\end\\"
                if fields[0] != wanted:
                    raise ValueError(f"{_shown(line)}: need {wanted} here")
                section = _Section(length, words)
            elif section.length == 0:
                declared.append(_declared_count(line, len(declared) + 1))
            else:
                section.add(number, fields)
        except _MalformedLineError:
            raise
        except ValueError as error:
            raise ValueError(f"ARPA line {number}: {error}") from error
    raise ValueError("ARPA text ends without \\end\\: it was cut off: write or copy it again")


class _MalformedLineError(ValueError):
    """_MalformedLineError names a line before the one that is being read."""


def _require_all_lengths(declared: Sequence[int], num_read: int) -> None:
    if not declared or num_read != len(declared):
        need = f"need the n-grams of lengths 1..{max(len(declared), 1)} before it"
        raise ValueError(f"\\end\\: {need}")


def _declared_count(line: str, length: int) -> int:
    name, _, count = line.partition("=")
    is_count = count.strip().isdecimal() and count.isascii() and len(count.strip()) < 16
    if length > MAX_ORDER or name.split() != ["ngram", str(length)] or not is_count:
        need = f"need `ngram {length}=COUNT`, of lengths 1..{MAX_ORDER} in order"
        raise ValueError(f"{_shown(line)}: {need}")
    return int(count)


@dataclass(slots=True)
class _Section:
    """_Section holds the lines of the n-grams of one length: numbers, words, and both logarithms.

    `ids` are the words that have a unigram; a section of unigrams fills it. The section of length 0
    declares how many lines the others have.
    """

    length: int
    ids: dict[str, int]
    numbers: "array[int]" = field(default_factory=lambda: array("i"))
    words: "array[int]" = field(default_factory=lambda: array("i"))
    log_probabilities: "array[float]" = field(default_factory=lambda: array("d"))
    log_backoffs: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, number: int, fields: list[str]) -> None:
        """Read a line's fields; ValueError for any that are none of an n-gram."""
        length = self.length
        try:
            log_probability = float(fields[0])
            log_backoff = float(fields[length + 1]) if len(fields) == length + 2 else 0.0
        except ValueError as error:
            raise ValueError("need log10 probabilities") from error
        if not length + 1 <= len(fields) <= length + 2:
            raise ValueError(
                f"{len(fields)} fields: need a probability and {length} words, and a back-off "
                "weight or none"
            )
        if not (-MAX_LOG <= log_backoff <= MAX_LOG and -MAX_LOG <= log_probability <= 0):
            need = (
                f"need a log10 probability of {-MAX_LOG:g} to 0, -99 for none, and a back-off "
                f"weight of {-MAX_LOG:g} to {MAX_LOG:g}"
            )
            raise ValueError(f"{fields[0]} and {log_backoff:g}: {need}")
        ids = self.ids
        if length == 1:
            if fields[1] in ids:
                raise ValueError(f"{_shown(fields[1])}: {_TWICE}")
            ids[fields[1]] = len(ids)
        try:
            self.words.extend([ids[word] for word in fields[1 : length + 1]])
        except KeyError as error:
            *history, _ = fields[1 : length + 1]
            lacks = _NO_HISTORY if error.args[0] in history else _NO_UNIGRAM
            shown = _shown(" ".join(fields[1 : length + 1]))
            raise ValueError(f"{shown}: {lacks}") from error
        self.numbers.append(number)
        self.log_probabilities.append(log_probability)
        self.log_backoffs.append(log_backoff)

    def ended(self, declared: Sequence[int], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the n-grams in order, or nothing for what declares them; ValueError if malformed.

        `lengths` are all shorter n-grams.
        """
        if self.length == 0:
            return []
        num_read = len(self.numbers)
        if num_read != declared[self.length - 1]:
            raise ValueError(
                f"{num_read} {self.length}-grams end here: need the {declared[self.length - 1]} "
                "that \\data\\ declares: copy the file again, or correct the count"
            )
        columns = np.frombuffer(self.words, np.int32).reshape(num_read, self.length)
        if self.length == 1:
            ordered = sorted(self.ids)
            rank = {word: number for number, word in enumerate(ordered)}
            columns = np.array([[rank[word]] for word in self.ids], np.int32).reshape(-1, 1)
            self.ids.clear()
            self.ids.update(rank)
        for is_wrong in (
            (columns[:, 1:] == self.ids.get(START, -1)).any(1),
            (columns[:, :-1] == self.ids.get(END, -1)).any(1),
        ):
            need = f"need {START} first and {END} last only: remove such lines, and count them out"
            self._require(columns, is_wrong, f"{need} of \\data\\")
        histories = np.zeros(num_read, np.int64)
        for shorter, words in zip(lengths, columns.T, strict=False):
            keys = ngram_keys(shorter["history"], shorter["word"], len(self.ids))
            wanted = ngram_keys(histories, words, len(self.ids))
            histories = np.searchsorted(keys, wanted)
            found = np.minimum(histories, len(keys) - 1)
            is_there = keys[found] == wanted if len(keys) else np.zeros(num_read, bool)
            self._require(columns, ~is_there, _NO_HISTORY)
        ngrams = np.zeros(num_read, NGRAM)
        ngrams["history"], ngrams["word"] = histories, columns[:, -1]
        ngrams["log_probability"] = np.frombuffer(self.log_probabilities)
        ngrams["log_backoff"] = np.frombuffer(self.log_backoffs)
        keys = ngram_keys(histories, columns[:, -1], len(self.ids))
        order = np.argsort(keys, kind="stable")
        is_double = np.zeros(num_read, bool)
        is_double[order[1:]] = np.diff(keys[order]) == 0
        self._require(columns, is_double, _TWICE)
        return [ngrams[order]]

    def _require(self, columns: np.ndarray, is_wrong: np.ndarray, need: str) -> None:
        """Raise ValueError for the first line that is wrong."""
        if is_wrong.any():
            row = int(is_wrong.argmax())
            words = list(self.ids)
            text = _shown(" ".join(words[each] for each in columns[row]))
            raise _MalformedLineError(f"ARPA line {self.numbers[row]}: {text}: {need}")


_BLANKS = re.compile(r"[ \t\r\n]+")
_TWICE = (
    "there twice: remove one; where the two differ by Unicode form alone, estimate the model of "
    "text in NFC"
)
_NO_HISTORY = "its history has no entry: list the shorter n-gram too"
_NO_UNIGRAM = "its last word has no unigram: list it too"


def _shown(text: str) -> str:
    return ascii(text.strip()[:60])


@dataclass(frozen=True, slots=True)
class RestrictedModel:
    """RestrictedModel is a model over a lexicon's words, and counts what that changed.

    `num_dropped_words` words and `num_dropped_ngrams` n-grams hold words outside the lexicon.
    `num_missing_words` words of the lexicon are not in the model, so no hypothesis has them.
    """

    model: BackoffModel
    num_dropped_words: int
    num_dropped_ngrams: int
    num_missing_words: int


def restricted(model: BackoffModel, words: Collection[str]) -> RestrictedModel:
    """Drop all n-grams with words outside `words`; the others keep their probabilities.

    ValueError where no word or no sentence end is left.
    """
    known = {*words, START, END}
    listed = known.intersection(model.words)
    if END not in listed:
        raise ValueError(f"the ARPA language model has no unigram {END}: need it to end sentences")
    if not listed - {START, END}:
        remedy = "need the lexicon's spelling, capitals too"
        raise ValueError(f"the ARPA language model has no word of lexicon.txt: {remedy}")
    of_words = np.array([word in known for word in model.words])
    is_kept = np.ones(len(model.ngrams), bool)
    for length in range(1, model.order + 1):
        of_length = model.of_length(length)
        ngrams = model.ngrams[of_length]
        is_kept[of_length] = is_kept[ngrams["history"]] & of_words[ngrams["word"]]
    return RestrictedModel(
        model.restricted_to(is_kept),
        num_dropped_words=len(model.words) - len(listed),
        num_dropped_ngrams=int((~is_kept).sum()),
        num_missing_words=len(set(words) - listed),
    )
