"""Follow the hours from ingest, and of each subset to training or evaluation, by manifests."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from infra.store.object_store import ObjectStore
from jobs.report_page.waterfall import EVERY_SUBSET
from pipeline.records import Tally
from pipeline.runs.manifest import Manifest, is_finished, read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    EVALUATION_STEP,
    HELDOUT,
    INGEST_STEP,
    LABELLED,
    PARTITIONS_STEP,
    TARGETS_STEP,
    UNLABELLED,
    features_step,
    selection_step,
)

LAST_STEPS: Mapping[str, tuple[str, ...]] = {
    UNLABELLED: (TARGETS_STEP, PARTITIONS_STEP),
    LABELLED: (ALIGNMENT_STEP,),
    HELDOUT: (EVALUATION_STEP,),
    DEV: (),
}
"""The steps that read a subset's features, as far as they keep its utterances."""


def ingests_of(store: ObjectStore, runs: Sequence[str]) -> dict[str, Manifest]:
    """Read the manifests of ingest by run; a corpus that no run has ingested has none."""
    found = (run for run in runs if is_finished(store, run, INGEST_STEP))
    return {run: read_manifest(store, run, INGEST_STEP) for run in found}


def waterfall_of(
    store: ObjectStore, run_uri: str, ingests: Collection[Manifest]
) -> dict[str, list[dict[str, Any]]]:
    """Return each subset's steps, with the milliseconds into, out of, and aside from each.

    Ingest is first, of all subsets and of all runs of a chain together.
    """
    found = {EVERY_SUBSET: [stage_of(INGEST_STEP, ingests)] if ingests else []}
    for subset, last in LAST_STEPS.items():
        found[subset] = [
            stage_of(step, [read_manifest(store, run_uri, step)])
            for step in (selection_step(subset), features_step(subset), *last)
            if is_finished(store, run_uri, step)
        ]
    return {subset: stages for subset, stages in found.items() if stages}


def stage_of(step: str, manifests: Collection[Manifest]) -> dict[str, Any]:
    """Return the milliseconds and utterances of one step's manifests together."""
    quarantined = sum((each.quarantined for each in manifests), Tally())
    return {
        "step": step,
        "in_ms": sum(each.tally_in.duration_ms for each in manifests),
        "out_ms": sum(each.tally_out.duration_ms for each in manifests),
        "unselected_ms": sum(each.unselected.duration_ms for each in manifests),
        "quarantined_ms": quarantined.duration_ms,
        "utterances_out": sum(each.tally_out.utterances for each in manifests),
        "utterances_quarantined": quarantined.utterances,
    }
