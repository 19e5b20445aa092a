"""Count the quarantined utterances by reason, and name the commands that read them again."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from infra.store.object_store import ObjectStore
from jobs.retry import REASONS
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import Manifest, is_finished
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    DEV_ALIGNMENT_STEP,
    FEATURES_FOLDER,
    INGEST_STEP,
    LATTICES_FOLDER,
    SELECTION_FOLDER,
    TARGETS_FOLDER,
    alignment_steps,
    evaluated_models,
    folder_of,
    lattices_step,
    section_of,
)
from training.settings.recipe import Recipe

Reasons = Mapping[str, Mapping[str, int]]

_RETRIED = (FEATURES_FOLDER, TARGETS_FOLDER)
_LEDGERS = (SELECTION_FOLDER, ALIGNMENTS_FOLDER, LATTICES_FOLDER, *_RETRIED)
"""The kinds of step that keep a ledger, beside ingest."""


def other_ledger_steps(store: ObjectStore, run_uri: str, recipe: Recipe) -> list[str]:
    """Return the finished steps that a report reads for their ledgers alone, in a run's order."""
    trained_on = recipe.sequence_training.models
    models = evaluated_models((), recipe.num_teachers, recipe.targets.rounds)
    lattices = (lattices_step(name) for name in models if section_of(name) in trained_on)
    aligned = (*alignment_steps(recipe.alignment.rounds), DEV_ALIGNMENT_STEP)
    with_ledger = (step for step in aligned if folder_of(step) in _LEDGERS)
    steps = (INGEST_STEP, *with_ledger, *lattices)
    return [step for step in steps if is_finished(store, run_uri, step)]


def quarantine_reasons(
    store: ObjectStore,
    run_uri: str,
    manifests: Mapping[str, Manifest],
    ingests: Mapping[str, Manifest],
) -> dict[str, dict[str, int]]:
    """Count the reasons of all ledgers; those of the `ingests` of a chain, by run, together."""
    of_runs = (ledger_reasons(store, run, each.ledgers) for run, each in ingests.items())
    ingested: Counter[str] = sum(of_runs, Counter())
    found = {INGEST_STEP: dict(ingested)} if ingests else {}
    return found | {
        name: dict(ledger_reasons(store, run_uri, manifest.ledgers))
        for name, manifest in manifests.items()
        if folder_of(name) in _LEDGERS
    }


def retry_commands(
    reasons: Reasons, run_uri: str, recipe: str, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Return for each step that `megahour retry` knows a command, safe to paste into a shell.

    What ingest and selection refused is wrong in its metadata: no command reads it.
    """
    settings = [part for override in overrides for part in ("--set", override)]
    found = []
    for step, counts in reasons.items():
        again = sorted(reason for reason in counts if reason in REASONS)
        if folder_of(step) in _RETRIED and again:
            only = () if folder_of(step) == TARGETS_FOLDER else ("--step", step)
            command = [
                *("megahour", "retry", "--recipe", recipe, *settings, "--run", run_uri, *only),
                *("--reason", ",".join(again)),
            ]
            found.append({"step": step, "reasons": again, "command": shlex.join(command)})
    return found
