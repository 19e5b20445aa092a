"""Count the quarantined utterances by reason, and name the commands that read them again."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from infra.store.object_store import ObjectStore
from jobs.retry import REASONS
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import (
    FEATURES_FOLDER,
    SELECTION_FOLDER,
    TARGETS_FOLDER,
    folder_of,
)

Reasons = Mapping[str, Mapping[str, int]]


def quarantine_reasons(
    store: ObjectStore, run_uri: str, manifests: Mapping[str, Manifest]
) -> dict[str, dict[str, int]]:
    """Count the reasons of the ledgers of selections, features and targets."""
    return {
        name: dict(ledger_reasons(store, run_uri, manifest.ledgers))
        for name, manifest in manifests.items()
        if folder_of(name) in (SELECTION_FOLDER, FEATURES_FOLDER, TARGETS_FOLDER)
    }


def retry_commands(
    reasons: Reasons, run_uri: str, recipe: str, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Return for each step that `megahour retry` knows a command, safe to paste into a shell.

    The utterances that a selection refused are wrong in their metadata: no command reads them.
    """
    settings = [part for override in overrides for part in ("--set", override)]
    found = []
    for step, counts in reasons.items():
        again = sorted(reason for reason in counts if reason in REASONS)
        if folder_of(step) != SELECTION_FOLDER and again:
            only = () if folder_of(step) == TARGETS_FOLDER else ("--step", step)
            command = [
                *("megahour", "retry", "--recipe", recipe, *settings, "--run", run_uri, *only),
                *("--reason", ",".join(again)),
            ]
            found.append({"step": step, "reasons": again, "command": shlex.join(command)})
    return found
