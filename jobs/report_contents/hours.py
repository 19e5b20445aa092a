"""Follow the hours of each subset from its metadata to training or evaluation, by manifests."""

from collections.abc import Mapping
from typing import Any

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    EVALUATION_STEP,
    HELDOUT,
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


def waterfall_of(store: ObjectStore, run_uri: str) -> dict[str, list[dict[str, Any]]]:
    """Return each subset's steps, with the milliseconds into, out of, and aside from each."""
    found = {
        subset: [
            stage_of(store, run_uri, step)
            for step in (selection_step(subset), features_step(subset), *last)
            if is_finished(store, run_uri, step)
        ]
        for subset, last in LAST_STEPS.items()
    }
    return {subset: stages for subset, stages in found.items() if stages}


def stage_of(store: ObjectStore, run_uri: str, step: str) -> dict[str, Any]:
    """Return the milliseconds and utterances of one step's manifest."""
    manifest = read_manifest(store, run_uri, step)
    return {
        "step": step,
        "in_ms": manifest.tally_in.duration_ms,
        "out_ms": manifest.tally_out.duration_ms,
        "unselected_ms": manifest.unselected.duration_ms,
        "quarantined_ms": manifest.quarantined.duration_ms,
        "utterances_out": manifest.tally_out.utterances,
    }
