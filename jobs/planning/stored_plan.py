"""Store a plan and its calibration in the run, and compare it with the run's records.

The report shows the comparison step by step.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from infra.cluster import Cluster
from infra.settings import read_record
from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUEST_KINDS
from jobs.planning.calibration import Calibration, json_object
from jobs.planning.run_plan import PAPER_DAYS, RunPlan, StepPlan, plan_run
from jobs.planning.volumes import spark_volumes
from jobs.planning.workload import Volume, Workload, run_workload
from jobs.run_table import written_steps
from pipeline.runs.names import COMMITS_FOLDER, PLAN_CALIBRATION, PLAN_DOCUMENT, folder_of
from pipeline.runs.sealed_json import NamedObject, naming, seal
from training.settings.recipe import Recipe


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


Comparison = dict[str, dict[str, float | None]]
"""Planned and actual values by quantity; None where a value is not known."""


def compare_plan(
    store: ObjectStore,
    run_uri: str,
    recipe: Recipe,
    cluster_of: Callable[[str], Cluster],
    records: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Compare tasks, objects, bytes, requests and seconds with the plan; {} before ingestion.

    `records` are the summaries of the steps. Seconds are planned only if the run has a calibration.
    """
    workload = run_workload(store, run_uri, recipe.selection.hours)
    if workload is None:
        return {}
    calibration = stored_calibration(store, run_uri)
    plans = _plans(workload, recipe, calibration, cluster_of)
    volumes = spark_volumes(workload, recipe)
    steps = {
        step: _compare(
            store,
            join_uri(run_uri, folder_of(written_steps(recipe, step)[-1])),
            records[step],
            volumes.get(step),
            plans.get(step),
        )
        for step in records
        if step in volumes or step in plans
    }
    return {"calibrated_on": calibration.machine if calibration else None, "steps": steps}


def _plans(
    workload: Workload,
    recipe: Recipe,
    calibration: Calibration | None,
    cluster_of: Callable[[str], Cluster],
) -> dict[str, StepPlan]:
    if calibration is None:
        return {}
    return {each.step: each for each in plan_run(workload, recipe, calibration, cluster_of).steps}


def _compare(
    store: ObjectStore,
    folder_uri: str,
    record: Mapping[str, Any],
    volume: Volume | None,
    plan: StepPlan | None,
) -> Comparison:
    comparison: Comparison = {}
    if volume is not None:
        found = store.list(folder_uri)
        tasks = sum(f"/{COMMITS_FOLDER}/" in each.uri for each in found)
        num_bytes = sum(each.num_bytes for each in found)
        comparison["tasks"] = _pair(volume.tasks, tasks)
        comparison["objects"] = _pair(volume.objects, len(found))
        comparison["bytes written"] = _pair(volume.bytes_written, num_bytes)
        comparison["requests"] = _pair(volume.requests.total, _requests(record))
        core_seconds = plan.core_seconds + plan.device_seconds if plan else None
        comparison["task seconds"] = _pair(core_seconds, record.get("task_seconds"))
    comparison["seconds"] = _pair(plan.wall_seconds if plan else None, record["seconds"])
    return comparison


def _requests(record: Mapping[str, Any]) -> float | None:
    counts = record.get("requests")
    return float(sum(counts[kind] for kind in REQUEST_KINDS)) if counts else None


def _pair(planned: float | None, actual: float | None) -> dict[str, float | None]:
    return {"planned": planned, "actual": actual}
