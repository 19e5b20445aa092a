"""Read what a run is given to ingest: manifests, the lexicon and the language model.

Each is read where it is: at the URI of an argument or in a Kaldi directory before ingestion, in
the corpus afterwards. Words that the lexicon lacks are named before anything is stored, and a
lexicon that a step may have read is never replaced.
"""

import argparse
import codecs
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from infra.log_lines import log
from infra.settings import ConfigurationError, printable
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from infra.store.uris import normalize_uri
from jobs.cli.arguments import DEFAULT_SPEAKER_BUCKETS, LANGUAGE_MODEL, subset_and_uri
from jobs.cli.job import Job
from pipeline.records import composed
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import (
    BOOTSTRAP_STEP,
    DEV,
    DEV_SHARE_SETTING,
    HELDOUT,
    INGEST_STEP,
    LABELLED,
    LANGUAGE_MODEL_FILES,
    LEXICON_FILE,
    MANIFESTS_SETTING,
)
from pipeline.steps.ingestion import (
    COLUMNS,
    DEFAULT_FORMAT,
    FORMATS,
    IGNORE_COLUMNS,
    RECORDINGS,
    reader_of,
)
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion
from pipeline.steps.ingestion.kaldi_directory import (
    UNDETERMINED_LOCALE,
    file_bytes,
    read_kaldi_directory,
)
from pipeline.steps.ingestion.manifest_format import CHANNEL, FIELDS, FormatOptions, ManifestFormat
from pipeline.steps.ingestion.manifest_probe import require_usable_rows
from pipeline.steps.ingestion.manifest_records import RecordRules
from pipeline.steps.ingestion.manifest_rows import Row
from pipeline.steps.ingestion.placed_audio import Simulation
from training.align.labelled import CorpusLexicon, UnknownWords
from training.decode.lexicon import Lexicon, decode_lexicon, rare_phones
from training.evaluate.language_model import LanguageModelFile


def read_language_model(uri: str) -> LanguageModelFile:
    """Read a language model by its URI; ValueError if it is too large, or no text."""
    uri = normalize_uri(uri)
    file = LanguageModelFile.read(ObjectStore((uri,)), uri, uri)
    file.text()
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
    """Read the lexicon; None if there is none yet, ConfigurationError for one that is none."""
    data = new_lexicon_bytes(job)
    if data is None and not has_new_lexicon(job.arguments):
        data = _stored_lexicon(job)
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


def ingestion_of(job: Job, simulation: Simulation | None) -> ManifestIngestion:
    """Return what the arguments name; ConfigurationError for what they cannot mean."""
    arguments, conversion = job.arguments, job.recipe.features.conversion
    rules = replace(_rules(job), dev_share=arguments.dev_share)
    manifests, model = manifests_of(arguments), arguments.language_model
    settings = {
        MANIFESTS_SETTING: [f"{each.subset}={each.uri}" for each in manifests],
        "format": arguments.format or DEFAULT_FORMAT,
        "columns": arguments.columns,
        "ignore_columns": arguments.ignore_columns,
        DEV_SHARE_SETTING: arguments.dev_share,
        "locale": rules.locale,
        "speaker_buckets": rules.num_buckets,
    }
    if any(each.format.names_channels for each in manifests):
        settings["channel"] = conversion.channel
    if simulation:
        settings |= {**simulation.choices.settings, "conversion": asdict(conversion)}
    return ManifestIngestion(
        manifest_store(manifests, job.store),
        manifests,
        rules,
        settings,
        {stored_name(model): read_language_model(model).data} if model else {},
        adds=bool(job.bases),
        simulation=simulation,
        conversion=conversion,
    )


def _rules(job: Job) -> RecordRules:
    """Return how rows become records; `channel` is the one that the recipe hears."""
    num_buckets = job.arguments.speaker_buckets or DEFAULT_SPEAKER_BUCKETS
    locale = job.arguments.locale or UNDETERMINED_LOCALE
    return RecordRules(locale, num_buckets, channel=job.recipe.features.conversion.channel)


def require_usable_manifests(job: Job) -> None:
    """Raise ConfigurationError for a manifest of which no row can be used, unless it is ingested.

    Once that is done, manifests and audio may be elsewhere.
    """
    if is_finished(job.store, job.run_uri, INGEST_STEP):
        return
    rules = _rules(job)
    manifests = manifests_of(job.arguments)
    may_read = manifest_store(manifests, job.store)
    for manifest in manifests:
        require_usable_rows(job.store, may_read, manifest, rules)


def manifests_of(arguments: argparse.Namespace) -> list[Manifest]:
    """Return the manifests that the arguments name; ConfigurationError for what they cannot be."""
    form = _format(arguments)
    return [Manifest(*subset_and_uri(each), form) for each in arguments.manifest]


def manifest_store(manifests: Sequence[Manifest], store: ObjectStore) -> ObjectStore:
    """Return a store that may read the manifests too."""
    prefixes = chain.from_iterable(each.format.prefixes(each.uri) for each in manifests)
    return ObjectStore((*store.allowed_prefixes, *prefixes))


def require_same_speakers(
    store: ObjectStore, bases: Sequence[str], ingestion: ManifestIngestion
) -> None:
    """Raise ConfigurationError where an increment would draw other development speakers.

    Only ingests of labelled speech draw any. A Kaldi directory's are drawn among its own speakers.
    """
    share = ingestion.rules.dev_share
    if LABELLED not in {manifest.subset for manifest in ingestion.manifests}:
        return
    for base in (each for each in bases if is_finished(store, each, INGEST_STEP)):
        config = read_manifest(store, base, INGEST_STEP).config
        manifests, theirs = config.get(MANIFESTS_SETTING), config[DEV_SHARE_SETTING]
        if manifests is None and (share or theirs):
            remedy = "ingest transcribed speech into a corpus of its own"
            said = f"{base} ingested a Kaldi directory, whose speakers have their subsets"
            raise ConfigurationError(f"--dev-share {share}: {said}: {remedy}")
        drew = any(each.startswith(f"{LABELLED}=") for each in manifests or ())
        if drew and share != theirs:
            said = f"{base} has {theirs}, and a speaker is in one subset"
            raise ConfigurationError(f"--dev-share {share}: {said}: give {theirs}")


def _format(arguments: argparse.Namespace) -> ManifestFormat:
    """Make the reader of the format; ConfigurationError for an option that it does not take."""
    chosen = arguments.format or DEFAULT_FORMAT
    reader = reader_of(chosen)
    given = {
        COLUMNS: arguments.columns,
        IGNORE_COLUMNS: arguments.ignore_columns,
        RECORDINGS: arguments.recordings,
    }
    for option, value in given.items():
        if value and option not in reader.takes:
            takers = [name for name in FORMATS if option in reader_of(name).takes]
            remedy = f"need --format {takers[0]}" if len(takers) == 1 else "leave it out"
            raise ConfigurationError(f"{option} with --format {chosen}: {remedy}")
    ignored = frozenset(filter(None, arguments.ignore_columns.split(",")))
    recordings_uri = normalize_uri(arguments.recordings) if arguments.recordings else ""
    return reader(FormatOptions(_columns(arguments.columns), ignored, recordings_uri))


def _columns(text: str) -> dict[str, str]:
    columns: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        field, _, column = pair.partition("=")
        if field not in (*FIELDS, CHANNEL) or not column or field in columns:
            need = f"need FIELD=COLUMN, each field once, of {', '.join((*FIELDS, CHANNEL))}"
            raise ConfigurationError(f"{COLUMNS} {printable(pair)}: {need}")
        columns[field] = column
    return columns


TRANSCRIBED = (LABELLED, DEV, HELDOUT)


def announce_lexicon(job: Job) -> None:
    """Say before anything is stored what a new lexicon lacks; ValueError if it may not be new.

    LossBudgetExceededError if too many utterances have words that it lacks.
    """
    data, lexicon = new_lexicon_bytes(job), read_lexicon(job)
    if data is not None and lexicon is not None and _stored_lexicon(job) != data:
        require_replaceable(job, data)
        for note in chain(phone_notes(data), vocabulary_notes(job, lexicon)):
            log(note)


def put_lexicon(job: Job) -> None:
    """Store the lexicon that ingest is given, also in the place of one that no step has read."""
    data, stored = new_lexicon_bytes(job), _stored_lexicon(job)
    if data is None or data == stored:
        return
    if stored is None and job.store.put_if_absent(_lexicon_uri(job), data):
        return
    require_replaceable(job, data)
    job.store.put(_lexicon_uri(job), data)


def require_replaceable(job: Job, data: bytes) -> None:
    """Raise ValueError if the corpus has another lexicon that a step may have read."""
    uri, stored = _lexicon_uri(job), _stored_lexicon(job)
    if stored in (None, data):
        return
    said = f"{uri} has other bytes than the lexicon given"
    if not f"{job.corpus_uri}/".startswith(f"{job.run_uri.rstrip('/')}/"):
        raise ValueError(
            f"{said}, and other runs may have read it: give the same, use another corpus.uri, or "
            "replace it there if no run has aligned by it"
        )
    if job.bases:
        raise ValueError(f"{said}, and {job.bases[0]} has aligned by it: give the same")
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
    if job.bases:
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
        store = manifest_store(manifests, job.store)
        for subset in TRANSCRIBED:
            yield subset, _texts(store, [each for each in manifests if each.subset == subset])


def _texts(store: ObjectStore, manifests: Sequence[Manifest]) -> Iterator[str]:
    for manifest in manifests:
        for piece in manifest.format.pieces(store, manifest.uri):
            for row in manifest.format.rows(store, piece):
                text = row.fields.get("text") if isinstance(row, Row) else None
                if isinstance(text, str) and text.strip():
                    yield composed(text)


def _lexicon_uri(job: Job) -> str:
    return join_uri(job.corpus_uri, LEXICON_FILE)


def _stored_lexicon(job: Job) -> bytes | None:
    try:
        return job.store.get(_lexicon_uri(job))
    except ObjectNotFound:
        return None
