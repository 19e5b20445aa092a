"""Read from the command line which manifests are ingested, in which format, into which subset."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from infra.settings import ConfigurationError, Range, printable
from infra.store.object_store import ObjectStore, normalize_uri
from jobs.cli.job import Job
from jobs.cli.parser import DEFAULT_SPEAKER_BUCKETS, LIBRISPEECH, MANIFEST_FORMATS, NEMO, TABLE
from jobs.ingestion.kaldi_directory import UNDETERMINED_LOCALE
from jobs.ingestion.language_data import texts_of
from jobs.ingestion.run_arguments import subset_and_uri
from pipeline.audio.conversion import NO_CONVERSION
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import DEV_SHARE_SETTING, INGEST_STEP, LABELLED, MANIFESTS_SETTING
from pipeline.steps.ingestion.directories import CommonVoice, Kaldi, LibriSpeech
from pipeline.steps.ingestion.formats import CHANNEL, FIELDS, ManifestFormat, Nemo, Table
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion
from pipeline.steps.ingestion.lhotse import LhotseCuts, LhotseSupervisions, Shar
from pipeline.steps.ingestion.manifest_probe import require_usable_rows
from pipeline.steps.ingestion.manifest_records import RecordRules
from pipeline.steps.ingestion.manifest_rows import IGNORE_COLUMNS

FORMATS: Mapping[str, Callable[..., ManifestFormat]] = dict(
    zip(
        MANIFEST_FORMATS,
        (Nemo, LhotseCuts, Shar, Kaldi, LibriSpeech, CommonVoice, Table),
        strict=True,
    )
)
SPEAKER_BUCKETS = Range(1, 100_000)


def ingestion_of(
    arguments: argparse.Namespace, store: ObjectStore, channel: str
) -> ManifestIngestion:
    """Return what the arguments name; ConfigurationError for what they cannot mean.

    `channel` is the one that the recipe hears, which rows may name.
    """
    rules = replace(_rules(arguments, channel), dev_share=arguments.dev_share)
    manifests = manifests_of(arguments)
    names_channels = any(isinstance(each.format, Nemo | Kaldi | Table) for each in manifests)
    return ManifestIngestion(
        manifest_store(arguments, manifests, store),
        manifests,
        rules,
        {
            MANIFESTS_SETTING: [f"{each.subset}={each.uri}" for each in manifests],
            "format": arguments.format or NEMO,
            "columns": arguments.columns,
            "locale": rules.locale,
            "speaker_buckets": rules.num_buckets,
            # Without them a manifest is as it was before there were any.
            **({"ignore_columns": arguments.ignore_columns} if arguments.ignore_columns else {}),
            **({"channel": channel} if names_channels and channel != NO_CONVERSION.channel else {}),
            **({DEV_SHARE_SETTING: arguments.dev_share} if arguments.dev_share else {}),
        },
        texts_of(arguments),
    )


def _rules(arguments: argparse.Namespace, channel: str) -> RecordRules:
    num_buckets = arguments.speaker_buckets
    num_buckets = DEFAULT_SPEAKER_BUCKETS if num_buckets is None else num_buckets
    if not SPEAKER_BUCKETS.admits(num_buckets):
        raise ConfigurationError(f"--speaker-buckets {num_buckets}: need {SPEAKER_BUCKETS.need}")
    locale = arguments.locale or UNDETERMINED_LOCALE
    return RecordRules(locale, num_buckets, channel=channel)


def require_usable_manifests(job: Job) -> None:
    """Raise ConfigurationError for a manifest of which no row can be used, unless it is ingested.

    Once that is done, manifests and audio may be elsewhere.
    """
    if is_finished(job.store, job.run_uri, INGEST_STEP):
        return
    rules = _rules(job.arguments, job.recipe.features.conversion.channel)
    manifests = manifests_of(job.arguments)
    may_read = manifest_store(job.arguments, manifests, job.store)
    for manifest in manifests:
        require_usable_rows(job.store, may_read, manifest, rules)


def manifests_of(arguments: argparse.Namespace) -> list[Manifest]:
    """Return the manifests that the arguments name; ConfigurationError for what they cannot be."""
    form = _format(arguments)
    return [Manifest(*subset_and_uri(each), form) for each in arguments.manifest]


def manifest_store(
    arguments: argparse.Namespace, manifests: Sequence[Manifest], store: ObjectStore
) -> ObjectStore:
    """Return a store that may read the manifests too."""
    recordings = [normalize_uri(arguments.recordings)] if arguments.recordings else []
    prefixes = [*(manifest.uri for manifest in manifests), *recordings]
    # Common Voice's table of durations lies beside its table.
    beside = [m.uri.rpartition("/")[0] for m in manifests if isinstance(m.format, CommonVoice)]
    return ObjectStore((*store.allowed_prefixes, *prefixes, *beside))


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
        manifests, theirs = config.get(MANIFESTS_SETTING), config.get(DEV_SHARE_SETTING, 0.0)
        if manifests is None and (share or theirs):
            remedy = "ingest transcribed speech into a corpus of its own"
            said = f"{base} ingested a Kaldi directory, whose speakers have their subsets"
            raise ConfigurationError(f"--dev-share {share}: {said}: {remedy}")
        drew = any(each.startswith(f"{LABELLED}=") for each in manifests or ())
        if drew and share != theirs:
            said = f"{base} has {theirs}, and a speaker is in one subset"
            raise ConfigurationError(f"--dev-share {share}: {said}: give {theirs}")


def _format(arguments: argparse.Namespace) -> ManifestFormat:
    chosen = arguments.format or NEMO
    ignored = frozenset(filter(None, arguments.ignore_columns.split(",")))
    if ignored and chosen == LIBRISPEECH:
        raise ConfigurationError(f"{IGNORE_COLUMNS} with --format {chosen}, which has no columns")
    if arguments.columns and chosen != TABLE:
        raise ConfigurationError(f"--columns with --format {chosen}: need --format table")
    if arguments.recordings and chosen != "lhotse":
        raise ConfigurationError(f"--recordings with --format {chosen}: need --format lhotse")
    if arguments.recordings:
        return LhotseSupervisions(normalize_uri(arguments.recordings), ignored)
    if chosen == TABLE:
        return Table(_columns(arguments.columns), ignored)
    return LibriSpeech() if chosen == LIBRISPEECH else FORMATS[chosen](ignored)


def _columns(text: str) -> dict[str, str]:
    columns: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        field, _, column = pair.partition("=")
        if field not in (*FIELDS, CHANNEL) or not column or field in columns:
            need = f"need FIELD=COLUMN, each field once, of {', '.join((*FIELDS, CHANNEL))}"
            raise ConfigurationError(f"--columns {printable(pair)}: {need}")
        columns[field] = column
    return columns
