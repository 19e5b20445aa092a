"""Read the lexicon and the language model that a run is given, where they are.

That is at the URI of an argument or in a Kaldi directory before ingestion, and in the corpus
afterwards. A lexicon that a step may have read is never replaced. This module imports no NumPy, so
that a recipe is checked without it.
"""

import argparse
import codecs
from collections.abc import Iterator
from pathlib import Path

from infra.settings import ConfigurationError, printable
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from infra.store.uris import normalize_uri
from jobs.cli.arguments import LANGUAGE_MODEL
from jobs.cli.job import Job
from pipeline.runs.names import BOOTSTRAP_STEP, LANGUAGE_MODEL_FILES, LEXICON_FILE
from training.decode.corpus_lexicon import CorpusLexicon
from training.decode.lexicon import Lexicon, decode_lexicon, rare_phones
from training.evaluate.language_model import MAX_BYTES, MAX_TEXT_BYTES, LanguageModelFile


def read_language_model(uri: str) -> LanguageModelFile:
    """Read a language model by its URI; ValueError if it is too large, or no text."""
    uri = normalize_uri(uri)
    file = LanguageModelFile.read(ObjectStore((uri,)), uri, uri)
    file.require_text(MAX_TEXT_BYTES if uri.removesuffix(".gz").endswith(".txt") else MAX_BYTES)
    return file


def stored_name(uri: str) -> str:
    """Name a language model in the corpus by its suffix; ConfigurationError for another suffix."""
    suffixes = {name.removeprefix("language_model"): name for name in LANGUAGE_MODEL_FILES}
    if found := next((name for suffix, name in suffixes.items() if uri.endswith(suffix)), None):
        return found
    need = f"need a name that ends with one of {', '.join(suffixes)}"
    raise ConfigurationError(f"{LANGUAGE_MODEL} {printable(uri)}: {need}")


def has_new_lexicon(arguments: argparse.Namespace) -> bool:
    """Return whether ingest will write the lexicon."""
    return bool(arguments.kaldi_dir or arguments.lexicon)


def read_lexicon(job: Job) -> Lexicon | None:
    """Read the lexicon; None if there is none yet, ConfigurationError if it is malformed."""
    data = new_lexicon_bytes(job)
    if data is None and not has_new_lexicon(job.arguments):
        data = stored_lexicon(job)
    if data is None:
        return None
    try:
        return CorpusLexicon(data, job.recipe.corpus.unknown_words).parse()
    except ValueError as error:
        raise ConfigurationError(f"{_lexicon_place(job)}: {error}") from error


def new_lexicon_bytes(job: Job) -> bytes | None:
    """Read the lexicon that ingest will write; None if it brings none."""
    arguments = job.arguments
    if arguments.kaldi_dir:
        if not Path(arguments.kaldi_dir).is_dir():
            where = printable(str(Path(arguments.kaldi_dir)))
            raise ConfigurationError(f"--kaldi-dir {where} is not a directory: correct the path")
        from pipeline.steps.ingestion.kaldi_directory import file_bytes  # noqa: PLC0415 - imports NumPy

        try:
            return file_bytes(Path(arguments.kaldi_dir) / LEXICON_FILE)
        except (OSError, ValueError) as error:
            raise ConfigurationError(str(error)) from error
    if not arguments.lexicon:
        return None
    uri = _lexicon_place(job)
    try:
        # The URI is the permission.
        return ObjectStore((uri,)).get(uri).removeprefix(codecs.BOM_UTF8)
    except ObjectNotFound as error:
        raise ConfigurationError(f"--lexicon {error}") from error


def _lexicon_place(job: Job) -> str:
    """Return where the lexicon is now: where ingest will take it from, or in the corpus."""
    if job.arguments.kaldi_dir:
        return str(Path(job.arguments.kaldi_dir) / LEXICON_FILE)
    return normalize_uri(job.arguments.lexicon or _lexicon_uri(job))


def put_lexicon(job: Job) -> None:
    """Store the lexicon that ingest is given, also in the place of one that no step has read."""
    data, stored = new_lexicon_bytes(job), stored_lexicon(job)
    if data is None or data == stored:
        return
    if stored is None and job.store.put_if_absent(_lexicon_uri(job), data):
        return
    require_replaceable(job, data)
    job.store.put(_lexicon_uri(job), data)


def require_replaceable(job: Job, data: bytes) -> None:
    """Raise ValueError if the corpus has another lexicon that a step may have read."""
    uri, stored = _lexicon_uri(job), stored_lexicon(job)
    if stored in (None, data):
        return
    said = f"{uri} has other bytes than the lexicon given"
    if not f"{job.corpus_uri}/".startswith(f"{job.run_uri.rstrip('/')}/"):
        raise ValueError(
            f"{said}, and other runs may have read it: give the same, use another corpus.uri, or "
            "replace it there if no run has aligned by it"
        )
    if job.bases.runs:
        raise ValueError(f"{said}, and {job.bases.runs[0]} has aligned by it: give the same")
    if job.store.list(folder := join_uri(job.run_uri, BOOTSTRAP_STEP)):
        raise ValueError(
            f"{said}, by which {folder} is aligned: give the same, or use another --run"
        )


def phone_notes(data: bytes) -> Iterator[str]:
    """Yield what may be wrong with the phones of a lexicon that was read."""
    if rare := rare_phones(decode_lexicon(data)):
        yield f"{LEXICON_FILE}: {rare}"


def _lexicon_uri(job: Job) -> str:
    return join_uri(job.corpus_uri, LEXICON_FILE)


def stored_lexicon(job: Job) -> bytes | None:
    """Read the corpus's lexicon; None if there is none."""
    try:
        return job.store.get(_lexicon_uri(job))
    except ObjectNotFound:
        return None
