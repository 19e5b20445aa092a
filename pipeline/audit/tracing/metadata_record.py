"""Find an utterance's metadata record, why it was not selected, and its audio."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from infra.configuration import read_record
from infra.store.object_store import ObjectStore, SizeBound, StoreError
from infra.store.uris import resolve_audio
from pipeline.audio.conversion import ANY_AUDIO
from pipeline.audio.errors import AudioError
from pipeline.audio_parts import parse_part
from pipeline.filters import SelectionFilters
from pipeline.records import Quarantined, Utterance
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import UNLABELLED
from pipeline.steps.part_requests import WantedAudio, read_audio
from pipeline.steps.selection.buckets import METADATA_SUFFIXES


def metadata_of_day(store: ObjectStore, metadata_uri: str, created_at: str | None) -> list[str]:
    """List all metadata objects, those of the day of `created_at` first."""
    uris = [each.uri for each in store.list(metadata_uri)]
    metadata = [uri for uri in uris if uri.endswith(METADATA_SUFFIXES)]
    day = _day(created_at)
    return sorted(metadata, key=lambda uri: f"/date={day}/" not in uri)


def _day(created_at: str | None) -> str:
    try:
        return datetime.fromisoformat(created_at or "").astimezone(UTC).date().isoformat()
    except (ValueError, OverflowError):  # none, or at the calendar's edge
        return ""


def why_unselected(manifest: Manifest, subset: str, record: Utterance | Quarantined) -> str:
    """Say why a record that is in no selection file and no ledger was left out."""
    if isinstance(record, Quarantined):
        return f"{record.reason}: {record.detail}"
    table = manifest.config.get("filters", {}) if subset == UNLABELLED else {}
    rejection = read_record(SelectionFilters, table, "filters").rejection(record)
    if rejection is not None:
        return f"refused by the recipe's filter of {rejection}"
    return f"over the budget of {manifest.config['hours']} h, or beyond its speaker's cap"


def audio_now(
    store: ObjectStore, corpus_uri: str, record: Mapping[str, Any], recorded_etag: str | None
) -> dict[str, Any]:
    """Fetch the audio of a record as it is now, and compare the ETag that extraction recorded."""
    uri = resolve_audio(corpus_uri, record["audio_uri"])
    about: dict[str, Any] = {"uri": uri, "recorded_etag": recorded_etag}
    if (part := parse_part(record, record.get("duration_s", 0.0))) is not None:
        about |= part.fields()
    [fetched] = read_audio(store, [WantedAudio(uri, SizeBound(), part, ANY_AUDIO)], 1)
    if isinstance(fetched, StoreError | AudioError):
        return {**about, "now": str(fetched)}
    about |= {"etag": fetched.etag, "num_bytes": len(fetched.data)}
    return about if recorded_etag is None else {**about, "unchanged": fetched.etag == recorded_etag}
