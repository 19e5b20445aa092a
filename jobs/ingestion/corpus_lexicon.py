"""The corpus's lexicon: what the transcripts need of it, and when another may take its place."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from infra.log_lines import log
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from jobs.cli.job import Job
from jobs.ingestion.kaldi_directory import read_kaldi_directory
from jobs.ingestion.language_data import LanguageData
from jobs.ingestion.manifest_choice import manifest_store, manifests_of
from pipeline.records import composed
from pipeline.runs.names import BOOTSTRAP_STEP, DEV, HELDOUT, LABELLED, LEXICON_FILE
from pipeline.steps.ingestion.ingest_manifests import Manifest
from pipeline.steps.ingestion.manifest_rows import Row
from training.align.labelled import UnknownWords
from training.decode.lexicon import Lexicon, decode_lexicon, rare_phones

TRANSCRIBED = (LABELLED, DEV, HELDOUT)


def announce_lexicon(job: Job) -> None:
    """Say before anything is stored what a new lexicon lacks; ValueError if it may not be new.

    LossBudgetExceededError if too many utterances have words that it lacks.
    """
    language_data = LanguageData.of(job.arguments)
    data, lexicon = language_data.lexicon_bytes(job), language_data.lexicon(job)
    if data is not None and lexicon is not None and _stored(job) != data:
        require_replaceable(job, data)
        for note in chain(phone_notes(data), vocabulary_notes(job, lexicon)):
            log(note)


def put_lexicon(job: Job) -> None:
    """Store the lexicon that ingest is given, also in the place of one that no step has read."""
    data, stored = LanguageData.of(job.arguments).lexicon_bytes(job), _stored(job)
    if data is None or data == stored:
        return
    if stored is None and job.store.put_if_absent(_uri(job), data):
        return
    require_replaceable(job, data)
    job.store.put(_uri(job), data)


def require_replaceable(job: Job, data: bytes) -> None:
    """Raise ValueError if the corpus has another lexicon that a step may have read."""
    uri, stored = _uri(job), _stored(job)
    if stored in (None, data):
        return
    said = f"{uri} has other bytes than the lexicon given"
    if not f"{job.corpus_uri}/".startswith(f"{job.run_uri.rstrip('/')}/"):
        raise ValueError(
            f"{said}, and other runs may have read it: give the same, use another corpus.uri, or "
            "replace it there if no run has aligned by it"
        )
    if job.increment:
        raise ValueError(f"{said}, and {job.increment.base} has aligned by it: give the same")
    if job.store.list(folder := join_uri(job.run_uri, BOOTSTRAP_STEP)):
        raise ValueError(
            f"{said}, by which {folder} is aligned: give the same, or use another --run"
        )


def phone_notes(data: bytes) -> Iterator[str]:
    """Yield what may be wrong with the phones of a lexicon that was read."""
    if rare := rare_phones(decode_lexicon(data)):
        yield f"{LEXICON_FILE}: {rare}"


def vocabulary_notes(job: Job, lexicon: Lexicon) -> Iterator[str]:
    """Yield by subset which words of the transcripts to ingest the lexicon lacks.

    LossBudgetExceededError if too many utterances to align have such words. The driver alone reads
    tables and manifests, and no audio. An increment aligns nothing: its base has.
    """
    if job.increment:
        return
    for subset, texts in _transcripts(job):
        unknown = UnknownWords.of(texts, lexicon)
        if subset != HELDOUT:
            unknown.check_loss(lexicon, subset, job.recipe.loss_budget)
        if note := unknown.note(lexicon, subset):
            yield note


def _transcripts(job: Job) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each subset that has transcripts to ingest, and these.

    A share of development speakers is still among the labelled ones.
    """
    arguments = job.arguments
    if arguments.kaldi_dir:
        directory = read_kaldi_directory(Path(arguments.kaldi_dir))
        for subset in TRANSCRIBED:
            some = (each for each in directory.utterances if each.subset == subset)
            yield subset, (composed(each.text or "") for each in some)
    elif arguments.manifest:
        manifests = manifests_of(arguments)
        store = manifest_store(arguments, manifests, job.store)
        for subset in TRANSCRIBED:
            yield subset, _texts(store, [each for each in manifests if each.subset == subset])


def _texts(store: ObjectStore, manifests: Sequence[Manifest]) -> Iterator[str]:
    for manifest in manifests:
        for piece in manifest.format.pieces(store, manifest.uri):
            for row in manifest.format.rows(store, piece):
                text = row.fields.get("text") if isinstance(row, Row) else None
                if isinstance(text, str) and text.strip():
                    yield composed(text)


def _uri(job: Job) -> str:
    return join_uri(job.corpus_uri, LEXICON_FILE)


def _stored(job: Job) -> bytes | None:
    try:
        return job.store.get(_uri(job))
    except ObjectNotFound:
        return None
