"""Plan the workload of a run from hours, or read it from the run's metadata."""

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

from infra.store.object_store import ObjectStore
from jobs.volumes import Subset, Workload
from pipeline.records import Tally
from pipeline.runs.manifest import Output, manifest_uri, read_manifest
from pipeline.runs.names import (
    ALL_SUBSETS,
    DEV,
    HELDOUT,
    INGEST_STEP,
    LABELLED,
    METADATA_FOLDER,
    UNLABELLED,
)
from pipeline.steps.selection.buckets import bucket_of

UTTERANCE_SECONDS = 3.6
"""Mean length of an utterance: 1e9 of them are 1e6 hours (003 I)."""

BUCKET_HOURS = 1_000
"""Planned hours of one speaker bucket: a task of selection then reads 1e6 records."""

METADATA_OBJECT_RECORDS = 100_000
"""Planned records of one metadata object: 20 MB."""

MAX_UTTERANCES_PER_REQUEST = 10_000
"""The largest recording of 512 MB has 9 h; its shortest utterances last 3 s."""

LABELLED_SHARE = 0.007
"""Labelled hours as a share of the unlabelled hours: 7,000 of 1e6 (003 VII-A)."""


def planned_workload(
    hours: float,
    labelled_hours: float,
    utterance_seconds: float = UTTERANCE_SECONDS,
    dev_hours: float = 0.0,
    heldout_hours: float = 0.0,
    utterances_per_request: float = 1.0,
) -> Workload:
    """Plan the subsets of a corpus before ingestion, all of whose metadata is selected."""
    if not 0 < hours <= 1e9:
        raise ValueError(f"hours = {hours}: need more than 0, at most 1e9")
    others = {LABELLED: labelled_hours, DEV: dev_hours, HELDOUT: heldout_hours}
    for name, some in others.items():
        if not 0 <= some <= 1e9:
            raise ValueError(f"{name} hours = {some}: need 0 or more, at most 1e9")
    if not 0 < utterance_seconds <= 3600:
        raise ValueError(f"utterance seconds = {utterance_seconds}: need more than 0, at most 3600")
    if not 1 <= utterances_per_request <= MAX_UTTERANCES_PER_REQUEST:
        raise ValueError(
            f"utterances per request = {utterances_per_request}: need 1 to "
            f"{MAX_UTTERANCES_PER_REQUEST}, what memory holds of one request's audio"
        )
    subsets = {UNLABELLED: hours, **others}
    return Workload(
        tuple(
            _planned(name, some, max(round(some * 3600 / utterance_seconds), 1))
            for name, some in subsets.items()
            if some
        ),
        utterances_per_request=utterances_per_request,
    )


def _planned(name: str, hours: float, records: int) -> Subset:
    buckets = max(1, round(hours / BUCKET_HOURS))
    objects = max(buckets, ceil(records / METADATA_OBJECT_RECORDS))
    return Subset(name, records, objects, (hours / buckets,) * buckets)


def run_workload(store: ObjectStore, run_uri: str, budget_hours: float) -> Workload | None:
    """Read the subsets of a run, with `budget_hours` to select (0 = all); None before ingestion.

    Filters, speaker caps and bad records are left out.
    """
    if not store.exists(manifest_uri(run_uri, INGEST_STEP)):
        return None
    outputs = read_manifest(store, run_uri, INGEST_STEP).outputs
    by_subset = {
        name: [each for each in outputs if each.key.startswith(f"{METADATA_FOLDER}/{name}/")]
        for name in ALL_SUBSETS
    }
    metadata = [each for some in by_subset.values() for each in some]
    return Workload(
        tuple(
            ingested(name, some, budget_hours if name == UNLABELLED else 0.0)
            for name, some in by_subset.items()
            if some
        ),
        record_bytes=sum(each.num_bytes for each in metadata)
        / max(sum(each.utterances for each in metadata), 1),
    )


def ingested(name: str, metadata: Sequence[Output], budget_hours: float) -> Subset:
    """Return the subset that these metadata objects make."""
    hours: dict[str, float] = defaultdict(float)
    for each in metadata:
        hours[bucket_of(f"/{each.key}")] += each.tally.hours
    total = sum((each.tally for each in metadata), Tally())
    selected = budget_hours / total.hours if budget_hours and total.hours else 1.0
    in_order = tuple(hours[bucket] for bucket in sorted(hours))
    return Subset(name, total.utterances, len(metadata), in_order, min(selected, 1.0))
