"""Find the development speakers' word errors with the settings that tuning chose."""

import json
from collections.abc import Mapping
from typing import Any

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import is_finished, read_manifest, read_output
from pipeline.runs.names import TUNING_STEP


def development_errors(store: ObjectStore, run_uri: str) -> dict[str, Mapping[str, Any]]:
    """Return each model's counts and rate as it was chosen; {} without development speakers."""
    if not is_finished(store, run_uri, TUNING_STEP):
        return {}
    tuning = read_manifest(store, run_uri, TUNING_STEP)
    chosen = tuning.statistic("settings", dict[str, dict[str, Any]])
    (output,) = tuning.outputs
    curves = json.loads(read_output(store, run_uri, output))
    return {
        name: next(point["word_errors"] for point in curves[name] if point["settings"] == settings)
        for name, settings in chosen.items()
    }
