"""Read from the command line which manifests are ingested, in which format, into which subset."""

import argparse
from collections.abc import Mapping

from infra.configuration import ConfigurationError
from infra.ranges import Range, printable
from infra.store.object_store import ObjectStore, normalize_uri
from jobs.cli.parser import MANIFEST_FORMATS
from jobs.ingestion.language_data import texts_of
from jobs.ingestion.run_arguments import subset_and_uri
from pipeline.steps.ingestion.directories import CommonVoice, Kaldi, LibriSpeech
from pipeline.steps.ingestion.formats import FIELDS, ManifestFormat, Nemo, Table
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion
from pipeline.steps.ingestion.lhotse import LhotseCuts, LhotseSupervisions, Shar
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
    form = _format(arguments)
    manifests = [Manifest(*subset_and_uri(each), form) for each in arguments.manifest]
    recordings = [normalize_uri(arguments.recordings)] if arguments.recordings else []
    prefixes = [*(manifest.uri for manifest in manifests), *recordings]
    # Common Voice's table of durations lies beside its table.
    beside = [m.uri.rpartition("/")[0] for m in manifests if isinstance(form, CommonVoice)]
    manifest_store = ObjectStore((*store.allowed_prefixes, *prefixes, *beside))
    return ManifestIngestion(
        manifest_store,
        manifests,
        RecordRules(arguments.locale, arguments.speaker_buckets),
        {
            "manifests": [f"{each.subset}={each.uri}" for each in manifests],
            "format": arguments.format,
            "columns": arguments.columns,
            "locale": arguments.locale,
            "speaker_buckets": arguments.speaker_buckets,
        },
        texts_of(arguments),
    )


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
