"""Find an utterance's metadata record, why it was not selected, and its audio."""

from datetime import UTC, datetime
from typing import Any

from infra.configuration import read_record
from infra.store.object_store import ObjectStore, StoreError
from pipeline.filters import SelectionFilters
from pipeline.records import Quarantined, Utterance
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import UNLABELLED
from pipeline.steps.selection.buckets import METADATA_SUFFIXES
from pipeline.steps.utterance_features import resolve_audio


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
    store: ObjectStore, corpus_uri: str, audio_uri: str, recorded_etag: str | None
) -> dict[str, Any]:
    """Fetch the audio object as it is now, and compare the ETag that extraction recorded."""
    uri = resolve_audio(corpus_uri, audio_uri)
    about: dict[str, Any] = {"uri": uri, "recorded_etag": recorded_etag}
    try:
        fetched = store.fetch(uri)
    except StoreError as error:
        return {**about, "now": str(error)}
    about |= {"etag": fetched.etag, "num_bytes": len(fetched.data)}
    return about if recorded_etag is None else {**about, "unchanged": fetched.etag == recorded_etag}
