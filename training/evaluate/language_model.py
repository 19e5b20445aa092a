"""Files of language models: an ARPA of the user's own, or a text to estimate one from."""

import gzip
import io
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from infra.store.object_store import ObjectStore
from infra.store.uris import resolve_audio
from pipeline.records import composed
from training.decode.lexicon import UNKNOWN

if TYPE_CHECKING:
    from training.decode.arpa import RestrictedModel
    from training.decode.ngrams import BackoffModel

MAX_BYTES = 640 * 2**20
"""The largest ARPA that is read, some 15 million n-grams; a gzip has it for its contents."""

MAX_TEXT_BYTES = 128 * 2**20
"""The largest text that a model is estimated from, some 24 million words."""

_NO_LETTERS = frozenset("<[!")
"""What begins a word of a lexicon that is none, such as <unk>, [noise] and !SIL."""

_GZIP = b"\x1f\x8b"
_UNREAD = {
    b"mmap lm ": "give the ARPA text, not KenLM's binary",
    **dict.fromkeys((b"BZh", b"\xfd7zXZ", b"PK\x03\x04"), "unpack it, or pack it by gzip"),
}
"""By their first bytes, files that are often given in a text's place."""


@dataclass(frozen=True, slots=True)
class LanguageModelFile:
    """LanguageModelFile holds an ARPA or a text as it was read, so that a step uses its digest."""

    uri: str
    data: bytes

    @classmethod
    def read(cls, store: ObjectStore, corpus_uri: str, name: str) -> "LanguageModelFile":
        """Read a file of the corpus by its name, or another by its URI; ValueError if too large."""
        uri = resolve_audio(corpus_uri, name)
        _require_size(uri, store.head(uri).num_bytes)
        return cls(uri, store.get(uri))

    @classmethod
    def at(cls, path: Path) -> "LanguageModelFile":
        """Read a file that ingest will copy into the corpus; OSError, ValueError if too large."""
        _require_size(str(path), path.stat().st_size)
        return cls(str(path), path.read_bytes())

    def lines(self, max_bytes: int) -> Iterator[str]:
        """Yield the lines of the file, which may be a gzip and is unpacked as it is read.

        Accents are composed, as in the lexicon, and a byte order mark is dropped. ValueError for a
        file that unpacks to more than the bound, for one that is damaged, and for the first line
        not in UTF-8. A megabyte of a gzip may unpack to a thousand.
        """
        for begin, remedy in _UNREAD.items():
            if self.data.startswith(begin):
                raise ValueError(f"{self.uri}: no text: {remedy}")
        file: io.BufferedIOBase = io.BytesIO(self.data)
        if self.data.startswith(_GZIP):
            file = gzip.GzipFile(fileobj=file)
        num_bytes = number = 0
        try:
            while line := file.readline(max_bytes + 1 - num_bytes):
                number += 1
                num_bytes += len(line)
                if num_bytes > max_bytes:
                    remedy = "prune the model, or estimate one from a part of the text"
                    raise ValueError(f"{self.uri}: more than {max_bytes} bytes, unpacked: {remedy}")
                yield composed((line.removeprefix(BOM_UTF8) if number == 1 else line).decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.uri}: line {number} is not UTF-8: convert it") from error
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{self.uri}: no whole gzip file: {error}; write it again") from error

    def require_text(self, max_bytes: int) -> None:
        """Read all lines; ValueError for what is no text, or more than the bound."""
        for _ in self.lines(max_bytes):
            pass

    def arpa(self) -> "BackoffModel":
        """Read it as an ARPA; ValueError names its first malformed line."""
        from training.decode.arpa import read_arpa  # noqa: PLC0415 - imports NumPy

        with self._named():
            lines = self.lines(MAX_BYTES)
            model = read_arpa(lines)
            for _ in lines:  # a gzip's checksum is behind \\end\\
                pass
            return model

    def restricted_arpa(self, words: Collection[str]) -> "RestrictedModel":
        """Read it as an ARPA over a lexicon's words; ValueError as `arpa`'s, or if it has none."""
        from training.decode.arpa import restricted  # noqa: PLC0415 - imports NumPy

        model = self.arpa()
        with self._named():
            return restricted(model, words)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in errors that do not."""
        try:
            yield
        except ValueError as error:
            if str(error).startswith(self.uri):
                raise
            raise ValueError(f"{self.uri}: {error}") from error

    def spellable_words(self, words: Collection[str], most: int) -> dict[str, int]:
        """Read it as text, and count the most frequent words that a lexicon lacks.

        They have letters of its words alone, which may pronounce them: no numbers or commas.
        """
        letters = set().union(*(word for word in words if word[0] not in _NO_LETTERS))
        counts = Counter(chain.from_iterable(self._sentences()))
        others = (word for word in counts if word not in words and letters.issuperset(word))
        chosen = sorted(others, key=lambda word: (-counts[word], word))[:most]
        return {word: counts[word] for word in chosen}

    def sentences(self, words: Collection[str]) -> list[list[str]]:
        """Read it as text, a sentence a line; UNKNOWN replaces words that a lexicon lacks.

        ValueError where it has none of the lexicon's words.
        """
        found = with_unknown(self._sentences(), words)
        if num_unknown(found) == sum(map(len, found)):
            need = "need the lexicon's spelling, capitals too"
            raise ValueError(f"{self.uri}: a text without any word of lexicon.txt: {need}")
        return found

    def _sentences(self) -> Iterator[list[str]]:
        """Yield the words of each line that has some, without <s> before and </s> behind them."""
        from training.decode.ngrams import END, START  # noqa: PLC0415 - imports NumPy

        for number, line in enumerate(self.lines(MAX_TEXT_BYTES), start=1):
            if "\r" in line.rstrip("\r\n"):
                need = "need ends of lines by a line feed"
                raise ValueError(f"{self.uri}: line {number}: carriage returns within: {need}")
            words = line.split()
            words = words[words[:1] == [START] : len(words) - (words[-1:] == [END])]
            if START in words or END in words:
                need = "need one sentence a line"
                raise ValueError(f"{self.uri}: line {number}: {START} or {END} within: {need}")
            if words:
                yield words


def with_unknown(sentences: Iterable[Sequence[str]], words: Collection[str]) -> list[list[str]]:
    """Put UNKNOWN for unknown words: it parts what is beside it, and is never predicted."""
    known = {word: word for word in words}  # one object a word, however often it occurs
    return [[known.get(word, UNKNOWN) for word in each] for each in sentences]


def _require_size(uri: str, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        remedy = "prune the model, or estimate one from a part of the text"
        raise ValueError(f"{uri}: {num_bytes} bytes: need at most {MAX_BYTES}: {remedy}")


def num_unknown(sentences: Iterable[Sequence[str]]) -> int:
    """Count the words that the lexicon lacks."""
    return sum(sentence.count(UNKNOWN) for sentence in sentences)
