"""A plan as JSON, kept in the run with its calibration for the report to find."""

import json
from dataclasses import asdict
from typing import Any

from infra.configuration import read_record
from infra.store.object_store import ObjectStore, join_uri
from jobs.planning.calibration.throughputs import Calibration, json_object
from jobs.planning.run_plan import PAPER_DAYS, RunPlan
from pipeline.runs.names import PLAN_FOLDER


def calibration_uri(run_uri: str) -> str:
    """Where `jobs.plan --run` leaves the calibration of a run."""
    return join_uri(run_uri, PLAN_FOLDER, "calibration.json")


def stored_calibration(store: ObjectStore, run_uri: str) -> Calibration | None:
    """The calibration that was left in a run, if any."""
    uri = calibration_uri(run_uri)
    if not store.exists(uri):
        return None
    return read_record(Calibration, json_object(store.get(uri), uri), uri)


def keep_plan(store: ObjectStore, run_uri: str, plan: RunPlan, calibration: Calibration) -> None:
    """Leave plan and calibration in the run, where the report sets them against what happened."""
    for uri, document in (
        (calibration_uri(run_uri), asdict(calibration)),
        (join_uri(run_uri, PLAN_FOLDER, "plan.json"), to_json(plan, calibration)),
    ):
        store.put(uri, (json.dumps(document, indent=1) + "\n").encode())


def to_json(plan: RunPlan, calibration: Calibration) -> dict[str, Any]:
    """The whole plan as plain values."""
    return {
        "workload": asdict(plan.workload),
        "steps": {step.step: asdict(step) | {"dollars": step.dollars} for step in plan.steps},
        "student_pipeline_days": plan.days,
        "paper_days": PAPER_DAYS,
        "calibration": asdict(calibration),
    }
