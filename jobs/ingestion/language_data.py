"""Read a run's lexicon and language model where they are: before ingestion, or in the corpus."""

import argparse
import codecs
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.settings import ConfigurationError, printable
from infra.store.object_store import ObjectNotFound, ObjectStore, StoreError, join_uri
from infra.store.uris import normalize_uri, require_within, resolve_audio
from jobs.cli.job import Job
from jobs.cli.parser import LANGUAGE_MODEL
from jobs.ingestion.kaldi_directory import file_bytes
from pipeline.runs.names import LANGUAGE_MODEL_FILES, LANGUAGE_MODEL_SETTINGS, LEXICON_FILE
from training.align.labelled import CorpusLexicon
from training.decode.arpa import RestrictedArpa, read_arpa
from training.decode.lexicon import Lexicon
from training.evaluate.language_model import LanguageModelFile, TextSentences
from training.settings.decoding import EvaluationConfig


def stored_name(uri: str) -> str:
    """Name a language model in the corpus by its suffix; ConfigurationError for another suffix."""
    suffixes = {name.removeprefix("language_model"): name for name in LANGUAGE_MODEL_FILES}
    for suffix, name in suffixes.items():
        if uri.endswith(suffix):
            return name
    need = f"need a name that ends with one of {', '.join(suffixes)}"
    raise ConfigurationError(f"{LANGUAGE_MODEL} {printable(uri)}: {need}")


def read_language_model(uri: str) -> LanguageModelFile:
    """Read a language model by its URI; ValueError if it is too large, or no text."""
    uri = normalize_uri(uri)
    file = LanguageModelFile.read(ObjectStore((uri,)), uri, uri)
    file.text()
    return file


def texts_of(arguments: argparse.Namespace) -> dict[str, bytes]:
    """Read the language model that the arguments name beside manifests, by its stored name."""
    if not arguments.language_model:
        return {}
    name = stored_name(arguments.language_model)
    return {name: read_language_model(arguments.language_model).data}


@dataclass(frozen=True, slots=True)
class LanguageData:
    """LanguageData says what ingest will write: a Kaldi directory's files, or those at URIs.

    What it does not bring is in the corpus, or nowhere.
    """

    directory: Path | None
    has_manifests: bool
    lexicon_uri: str
    language_model_uri: str

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "LanguageData":
        """Return what the arguments of a run name."""
        directory = Path(arguments.kaldi_dir) if arguments.kaldi_dir else None
        texts = arguments.lexicon or "", arguments.language_model or ""
        return cls(directory, bool(arguments.manifest), *texts)

    @property
    def has_new_lexicon(self) -> bool:
        """Return whether ingest will write the lexicon."""
        return self.directory is not None or bool(self.lexicon_uri)

    def lexicon(self, job: Job) -> Lexicon | None:
        """Read the lexicon; None if there is none yet, ConfigurationError for one that is none."""
        data = self.lexicon_bytes(job)
        if data is None and not self.has_new_lexicon:
            with suppress(ObjectNotFound):
                data = job.store.get(self._lexicon_place(job))
        if data is None:
            return None
        try:
            return CorpusLexicon(data, job.recipe.corpus.unknown_words).parse()
        except ValueError as error:
            raise ConfigurationError(f"{self._lexicon_place(job)}: {error}") from error

    def lexicon_bytes(self, job: Job) -> bytes | None:
        """Read the lexicon that ingest will write; None if it brings none."""
        if self.directory is not None:
            if not self.directory.is_dir():
                where = printable(str(self.directory))
                raise ConfigurationError(
                    f"--kaldi-dir {where} is not a directory: correct the path"
                )
            try:
                return file_bytes(self.directory / LEXICON_FILE)
            except (OSError, ValueError) as error:
                raise ConfigurationError(str(error)) from error
        if not self.lexicon_uri:
            return None
        uri = self._lexicon_place(job)
        try:
            # The URI is the permission.
            return ObjectStore((uri,)).get(uri).removeprefix(codecs.BOM_UTF8)
        except ObjectNotFound as error:
            raise ConfigurationError(f"--lexicon {error}") from error

    def _lexicon_place(self, job: Job) -> str:
        if self.directory is not None:
            return str(self.directory / LEXICON_FILE)
        return normalize_uri(self.lexicon_uri or join_uri(job.corpus_uri, LEXICON_FILE))

    def language_model_notes(
        self, readers: Sequence[Job], lexicon: Lexicon | None
    ) -> Iterator[str]:
        """Read the files that evaluation names, and yield what hypotheses will lack by them.

        Raises ConfigurationError for a file that one of the `readers` could not use, hours later.
        """
        job = readers[0]
        self._require_use(job.recipe.evaluation)
        for setting in LANGUAGE_MODEL_SETTINGS:
            name: str = getattr(job.recipe.evaluation, setting)
            if not name:
                continue
            where = f"evaluation.{setting} = {printable(name)!r}"
            uri = resolve_audio(job.corpus_uri, name)
            try:
                for each in readers:
                    require_within(uri, each.store.allowed_prefixes)
                if uri != name and lexicon is None:  # ingested, and there is no corpus yet
                    continue
                note = _note(setting, self._file(job, name), lexicon)
            except (OSError, StoreError, ValueError) as error:
                raise ConfigurationError(f"{where}: {error}") from error
            if note:
                yield f"{where}: {note}"

    def _require_use(self, evaluation: EvaluationConfig) -> None:
        """Raise ConfigurationError for a language model that no setting of the recipe names."""
        if not self.language_model_uri:
            return
        name = stored_name(self.language_model_uri)
        if name not in (evaluation.arpa, evaluation.language_model_text):
            setting = "arpa" if ".arpa" in name else "language_model_text"
            raise ConfigurationError(
                f"{LANGUAGE_MODEL} {printable(self.language_model_uri)}: the recipe does not use "
                f"it: set evaluation.{setting} = {name!r}"
            )

    def _file(self, job: Job, name: str) -> LanguageModelFile:
        """Read a file where it is now: where ingest will take it from, or in the store."""
        if name not in LANGUAGE_MODEL_FILES:
            return LanguageModelFile.read(job.store, job.corpus_uri, name)
        if self.directory is not None:
            if not (self.directory / name).is_file():
                where = self.directory / name
                raise ValueError(f"{where} is no file: put it there, or name the URI of another")
            return LanguageModelFile.at(self.directory / name)
        if self.language_model_uri:
            return read_language_model(self.language_model_uri)
        uri = join_uri(job.corpus_uri, name)
        if self.has_manifests and not job.store.exists(uri):
            raise ValueError(f"{uri} is absent: give {LANGUAGE_MODEL} URI")
        return LanguageModelFile.read(job.store, job.corpus_uri, name)


def _note(setting: str, file: LanguageModelFile, lexicon: Lexicon | None) -> str:
    """Say which words no hypothesis will have; without a lexicon, only read the file."""
    words = lexicon.pronunciations.keys() if lexicon else ()
    if setting == "arpa":
        arpa = file.arpa(words) if lexicon else read_arpa(file.text())
        missing = arpa.num_missing_words if isinstance(arpa, RestrictedArpa) else 0
        said = f"{missing} of the {len(words)} words of {LEXICON_FILE} are not in it"
    else:
        text = file.sentences(words) if lexicon else file.text()
        missing = text.num_unknown if isinstance(text, TextSentences) else 0
        said = f"{missing} of its words are not in {LEXICON_FILE}"
    return f"{said}, and will be in no hypothesis" if missing else ""
