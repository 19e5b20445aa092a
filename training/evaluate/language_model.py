"""The language model that a run decodes with: estimated from its transcripts, or the user's own."""

import gzip
import io
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infra.store.object_store import ObjectStore
from infra.store.uris import resolve_audio
from pipeline.records import Tally
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import Output, sha256
from pipeline.runs.names import LANGUAGE_MODEL_SETTINGS
from training.decode.lexicon import Lexicon
from training.decode.ngrams import (
    UNKNOWN,
    RestrictedArpa,
    kneser_ney_arpa,
    restrict_arpa,
    witten_bell_arpa,
)
from training.settings.decoding import EvaluationConfig

MAX_BYTES = 64 * 2**20
"""The largest ARPA or text that is read, some 2 million n-grams or 12 million words.

A gzip has it for its contents.
"""

_GZIP = b"\x1f\x8b"
_ESTIMATE = {"witten_bell": witten_bell_arpa, "kneser_ney": kneser_ney_arpa}


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

    def text(self) -> str:
        """Decode the file, which may be a gzip; ValueError names the first line not in UTF-8."""
        data = self._unpacked() if self.data.startswith(_GZIP) else self.data
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{self.uri}: line {line} is not UTF-8: convert it") from error

    def _unpacked(self) -> bytes:
        """Unpack a gzip up to the bound; ValueError for a larger one, and for one that is damaged.

        A megabyte of it may unpack to a thousand.
        """
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(self.data)) as file:
                data = file.read(MAX_BYTES + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{self.uri}: no whole gzip file: {error}; write it again") from error
        if len(data) > MAX_BYTES:
            remedy = "prune the model, or estimate one from a part of the text"
            raise ValueError(f"{self.uri}: unpacks to more than {MAX_BYTES} bytes: {remedy}")
        return data

    def arpa(self, words: Collection[str]) -> RestrictedArpa:
        """Read it as an ARPA over a lexicon's words; ValueError names its first malformed line."""
        try:
            return restrict_arpa(self.text(), words)
        except ValueError as error:
            raise ValueError(f"{self.uri}: {error}") from error

    def sentences(self, words: Collection[str]) -> list[list[str]]:
        """Read it as text, a sentence a line; UNKNOWN replaces words that a lexicon lacks.

        ValueError where it has none of the lexicon's words.
        """
        lines = [line.split() for line in self.text().splitlines()]
        found = _known(filter(None, lines), words)
        if num_unknown(found) == sum(map(len, found)):
            need = "need the lexicon's spelling, capitals too"
            raise ValueError(f"{self.uri}: a text without any word of lexicon.txt: {need}")
        return found


def _known(sentences: Iterable[Sequence[str]], words: Collection[str]) -> list[list[str]]:
    """Put UNKNOWN for unknown words: it parts what is beside it, and is never predicted."""
    return [[word if word in words else UNKNOWN for word in each] for each in sentences]


def _require_size(uri: str, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        remedy = "prune the model, or estimate one from a part of the text"
        raise ValueError(f"{uri}: {num_bytes} bytes: need at most {MAX_BYTES}: {remedy}")


def num_unknown(sentences: Iterable[Sequence[str]]) -> int:
    """Count the words that the lexicon lacks."""
    return sum(sentence.count(UNKNOWN) for sentence in sentences)


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """LanguageModel: `arpa(order)` returns ARPA text; the user's own model has its own order."""

    arpa: Callable[[int], str]
    has_own_order: bool
    statistics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LanguageModelFiles:
    """LanguageModelFiles holds what an evaluation reads besides transcripts, by its setting."""

    by_setting: Mapping[str, LanguageModelFile]

    @classmethod
    def read(
        cls, store: ObjectStore, corpus_uri: str, config: EvaluationConfig
    ) -> "LanguageModelFiles":
        """Read the files that the recipe names; the store refuses others than it may read."""
        named = {name: getattr(config, name) for name in LANGUAGE_MODEL_SETTINGS}
        files = {name: uri for name, uri in named.items() if uri}
        return cls(
            {name: LanguageModelFile.read(store, corpus_uri, uri) for name, uri in files.items()}
        )

    @property
    def digests(self) -> dict[str, str]:
        """Return each file's SHA-256, as inputs of a step."""
        return {name: sha256(file.data) for name, file in self.by_setting.items()}

    def reads(self, store: ObjectStore, run_uri: str) -> list[str]:
        """Name the steps that the model reads, besides alignment."""
        from training.align.labelled import transcript_reads  # noqa: PLC0415 - imports NumPy

        return [] if "arpa" in self.by_setting else transcript_reads(store, run_uri)

    def model(
        self, store: ObjectStore, run_uri: str, lexicon: Lexicon, config: EvaluationConfig
    ) -> LanguageModel:
        """Return the user's ARPA, or what estimates models of the labelled transcripts and text.

        ValueError for a malformed ARPA, with its line.
        """
        from training.align.labelled import labelled_transcripts  # noqa: PLC0415 - imports NumPy

        words = lexicon.pronunciations.keys()
        if (arpa := self.by_setting.get("arpa")) is not None:
            given = arpa.arpa(words)
            counts = {
                "num_dropped_words": given.num_dropped_words,
                "num_dropped_ngrams": given.num_dropped_ngrams,
                "num_missing_words": given.num_missing_words,
            }
            return LanguageModel(lambda _: given.text, has_own_order=True, statistics=counts)
        sentences = _known(labelled_transcripts(store, run_uri), words)
        statistics: dict[str, Any] = {}
        if (text := self.by_setting.get("language_model_text")) is not None:
            extra = text.sentences(words)
            statistics = {
                "num_text_sentences": len(extra),
                "num_text_words": sum(map(len, extra)),
                "num_unknown_words": num_unknown(extra),
            }
            sentences += extra
        estimate = _ESTIMATE[config.smoothing]
        return LanguageModel(
            partial(estimate, sentences, lexicon.pronunciations),
            has_own_order=False,
            statistics=statistics,
        )


def store_arpas(
    context: StepContext, model: LanguageModel, orders: Iterable[int]
) -> dict[int, Output]:
    """Store the model of each order for a step's tasks, which build graphs of it."""
    return {
        order: context.put_output(f"arpa-{order}", ".arpa", model.arpa(order).encode(), Tally())
        for order in sorted(set(orders))
    }
