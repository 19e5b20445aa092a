"""Read from the command line which manifests are ingested, in which format, into which subset."""

import argparse
from collections.abc import Mapping, Sequence

from infra.configuration import ConfigurationError
from infra.ranges import Range, printable
from infra.store.object_store import ObjectStore, normalize_uri
from jobs.cli.parser import MANIFEST_FORMATS
from jobs.ingestion.language_data import texts_of
from jobs.ingestion.run_arguments import subset_and_uri
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import DEV_SHARE_SETTING, INGEST_STEP, LABELLED, MANIFESTS_SETTING
from pipeline.steps.ingestion.directories import CommonVoice, Kaldi, LibriSpeech
from pipeline.steps.ingestion.formats import FIELDS, ManifestFormat, Nemo, Table
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion
from pipeline.steps.ingestion.lhotse import LhotseCuts, LhotseSupervisions, Shar
from pipeline.steps.ingestion.manifest_probe import require_usable_rows
from pipeline.steps.ingestion.manifest_records import RecordRules

FORMATS: Mapping[str, type[ManifestFormat]] = dict(
    zip(
        MANIFEST_FORMATS,
        (Nemo, LhotseCuts, Shar, Kaldi, LibriSpeech, CommonVoice, Table),
        strict=True,
    )
)
SPEAKER_BUCKETS = Range(1, 100_000)


def ingestion_of(arguments: argparse.Namespace, store: ObjectStore) -> ManifestIngestion:
    """Return what the arguments name; ConfigurationError for what they cannot mean."""
    if not SPEAKER_BUCKETS.admits(arguments.speaker_buckets):
        need = f"need {SPEAKER_BUCKETS.need}"
        raise ConfigurationError(f"--speaker-buckets {arguments.speaker_buckets}: {need}")
    manifest_store, manifests = manifests_of(arguments, store)
    return ManifestIngestion(
        manifest_store,
        manifests,
        RecordRules(arguments.locale, arguments.speaker_buckets, arguments.dev_share),
        {
            MANIFESTS_SETTING: [f"{each.subset}={each.uri}" for each in manifests],
            "format": arguments.format,
            "columns": arguments.columns,
            "locale": arguments.locale,
            "speaker_buckets": arguments.speaker_buckets,
            **({DEV_SHARE_SETTING: arguments.dev_share} if arguments.dev_share else {}),
        },
        texts_of(arguments),
    )


def manifests_of(
    arguments: argparse.Namespace, store: ObjectStore
) -> tuple[ObjectStore, list[Manifest]]:
    """Return the manifests that the arguments name, and a store that may read them."""
    form = _format(arguments)
    manifests = [Manifest(*subset_and_uri(each), form) for each in arguments.manifest]
    recordings = [normalize_uri(arguments.recordings)] if arguments.recordings else []
    prefixes = [*(manifest.uri for manifest in manifests), *recordings]
    # Common Voice's table of durations lies beside its table.
    beside = [m.uri.rpartition("/")[0] for m in manifests if isinstance(form, CommonVoice)]
    return ObjectStore((*store.allowed_prefixes, *prefixes, *beside)), manifests


def require_usable_manifests(
    arguments: argparse.Namespace, store: ObjectStore, run_uri: str
) -> None:
    """Raise ConfigurationError for a manifest of which no row can be used, unless it is ingested.

    Once that is done, manifests and audio may be elsewhere.
    """
    if is_finished(store, run_uri, INGEST_STEP):
        return
    rules = RecordRules(arguments.locale, arguments.speaker_buckets)
    manifest_store, manifests = manifests_of(arguments, store)
    for manifest in manifests:
        require_usable_rows(store, manifest_store, manifest, rules)


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
    chosen = arguments.format
    if arguments.columns and chosen != "table":
        raise ConfigurationError(f"--columns with --format {chosen}: need --format table")
    if arguments.recordings and chosen != "lhotse":
        raise ConfigurationError(f"--recordings with --format {chosen}: need --format lhotse")
    if arguments.recordings:
        return LhotseSupervisions(normalize_uri(arguments.recordings))
    return Table(_columns(arguments.columns)) if chosen == "table" else FORMATS[chosen]()


def _columns(text: str) -> dict[str, str]:
    columns: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        field, _, column = pair.partition("=")
        if field not in FIELDS or not column or field in columns:
            need = f"need FIELD=COLUMN, each field once, of {', '.join(FIELDS)}"
            raise ConfigurationError(f"--columns {printable(pair)}: {need}")
        columns[field] = column
    return columns
