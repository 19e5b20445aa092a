"""What a job's record holds beside what a test is about."""

from typing import Any

from pipeline.runs.names import (
    EVALUATED_MODELS,
    EVALUATION_STEP,
    SUBSETS,
    TARGETS_STEP,
    features_step,
    model_step,
    selection_step,
)

REPORTED_STEPS = (
    *(EVALUATION_STEP, TARGETS_STEP, *map(model_step, EVALUATED_MODELS)),
    *map(selection_step, SUBSETS),
    *map(features_step, SUBSETS),
)
"""The steps that the report of a run with unlabelled speech reads."""

RECORD: dict[str, Any] = {
    "finished_at": "2026-11-24T10:00:00+00:00",
    "seconds": 60,
    "task_seconds": 50,
    "recipe": {},
    "manifests": {},
    "pace": {},
    "trainers": {},
    "requests": dict.fromkeys(("get", "put", "head", "list", "retries"), 0),
    "cluster": {"instance_type": "x", "num_instances": 2, "price_per_instance_hour": 3.0},
    "device_faults": [],
    "machine": "a machine",
    "commit": "abc",
}
