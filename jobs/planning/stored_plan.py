"""Store a plan and its calibration in the run as JSON, and read them for the report."""

import json
from dataclasses import asdict
from typing import Any

from infra.settings import read_record
from infra.store.object_store import ObjectStore, join_uri
from jobs.planning.calibration.throughputs import Calibration, json_object
from jobs.planning.run_plan import PAPER_DAYS, RunPlan
from pipeline.runs.names import PLAN_CALIBRATION, PLAN_DOCUMENT
from pipeline.runs.sealed_json import NamedObject, naming, seal


def calibration_uri(run_uri: str) -> str:
    """Return the URI at which `megahour plan --run` stores the calibration of a run."""
    return join_uri(run_uri, PLAN_CALIBRATION)


def stored_calibration(store: ObjectStore, run_uri: str) -> Calibration | None:
    """Read the calibration stored in a run; None if there is none."""
    uri = calibration_uri(run_uri)
    if not store.exists(uri):
        return None
    return read_record(Calibration, json_object(store.get(uri), uri), uri)


def store_plan(store: ObjectStore, run_uri: str, plan: RunPlan, calibration: Calibration) -> None:
    """Store plan and calibration in the run; the report compares them with the records.

    The last plan replaces earlier ones. Each of the two documents holds the whole calibration.
    """
    measured = (json.dumps(asdict(calibration), indent=1) + "\n").encode()
    named = [NamedObject.of(PLAN_CALIBRATION, measured)]
    planned = seal(naming(to_json(plan, calibration), named), indent=1)
    for key, data in ((PLAN_CALIBRATION, measured), (PLAN_DOCUMENT, planned)):
        store.put(join_uri(run_uri, key), data)


def to_json(plan: RunPlan, calibration: Calibration) -> dict[str, Any]:
    """Convert the whole plan to plain values."""
    return {
        "workload": asdict(plan.workload),
        "steps": {step.step: asdict(step) | {"dollars": step.dollars} for step in plan.steps},
        "student_pipeline_days": plan.days,
        "paper_days": PAPER_DAYS,
        "calibration": asdict(calibration),
    }
