"""Read the manifests and Kaldi directories that a run is given, before they are ingested.

Words of their transcripts that the lexicon lacks are named before anything is stored.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from infra.log_lines import log
from infra.settings import ConfigurationError, printable
from infra.store.object_store import ObjectStore
from infra.store.uris import normalize_uri
from jobs.cli.arguments import DEFAULT_SPEAKER_BUCKETS, recognizer_and_uri, subset_and_uri
from jobs.cli.job import Job
from jobs.lexicon_sources import (
    new_lexicon_bytes,
    phone_notes,
    read_language_model,
    read_lexicon,
    require_replaceable,
    stored_lexicon,
    stored_name,
)
from pipeline.records import MAX_HYPOTHESES, composed
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import (
    DEV,
    DEV_SHARE_SETTING,
    HELDOUT,
    INGEST_STEP,
    LABELLED,
    MANIFESTS_SETTING,
)
from pipeline.steps.ingestion import (
    COLUMNS,
    DEFAULT_FORMAT,
    FORMATS,
    IGNORE_COLUMNS,
    RECORDINGS,
    TRANSCRIPTS,
    reader_of,
)
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion
from pipeline.steps.ingestion.kaldi_directory import UNDETERMINED_LOCALE, read_kaldi_directory
from pipeline.steps.ingestion.manifest_format import CHANNEL, FIELDS, FormatOptions, ManifestFormat
from pipeline.steps.ingestion.manifest_probe import require_usable_rows
from pipeline.steps.ingestion.manifest_records import RecordRules
from pipeline.steps.ingestion.manifest_rows import Row
from pipeline.steps.ingestion.placed_audio import Simulation
from pipeline.steps.ingestion.transcripts import Transcripts, transcript_settings
from training.decode.corpus_lexicon import UnknownWords
from training.decode.lexicon import Lexicon


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
    transcripts = transcripts_of(job)
    settings |= transcript_settings(transcripts)
    if simulation:
        settings |= {**simulation.choices.settings, "conversion": asdict(conversion)}
    return ManifestIngestion(
        manifest_store(manifests, job.store),
        manifests,
        rules,
        settings,
        {stored_name(model): read_language_model(model).data} if model else {},
        adds=bool(job.bases.runs),
        transcripts=transcripts,
        simulation=simulation,
        conversion=conversion,
    )


def transcripts_of(job: Job) -> tuple[Transcripts, ...]:
    """List what recognizers heard; ConfigurationError for too many, and for two of one name."""
    given = map(recognizer_and_uri, job.arguments.transcripts)
    found = tuple(Transcripts.listed(*each) for each in given)
    if len(found) > MAX_HYPOTHESES:
        most = f"need at most {MAX_HYPOTHESES}"
        raise ConfigurationError(f"{TRANSCRIPTS}: {len(found)} recognizers: {most}")
    names = Counter(each.recognizer for each in found)
    if repeated := next((name for name, count in names.items() if count > 1), None):
        raise ConfigurationError(f"{TRANSCRIPTS} {repeated}: twice: give each a name of its own")
    return found


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
    if data is not None and lexicon is not None and stored_lexicon(job) != data:
        require_replaceable(job, data)
        for note in chain(phone_notes(data), vocabulary_notes(job, lexicon)):
            log(note)


def vocabulary_notes(job: Job, lexicon: Lexicon) -> Iterator[str]:
    """Yield by subset which words of the transcripts to ingest the lexicon lacks.

    LossBudgetExceededError if too many utterances to align have such words. The driver alone reads
    tables and manifests, and no audio. An increment aligns nothing: its base has.
    """
    if job.bases.runs:
        return
    rule = job.recipe.corpus.unknown_words
    for subset, texts in _transcripts(job):
        unknown = UnknownWords.of(texts, lexicon)
        if subset != HELDOUT:
            unknown.check_loss(lexicon, subset, job.recipe.loss_budget, rule)
        if note := unknown.note(lexicon, subset, rule):
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
