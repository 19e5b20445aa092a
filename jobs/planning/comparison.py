"""Compare the plan of a run with its records, step by step, for the report."""

from collections.abc import Callable, Mapping
from typing import Any

from infra.cluster import Cluster
from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.catalogue import EXTRACT_FEATURES, GENERATE_TARGETS, REPARTITION, SELECT_UTTERANCES
from jobs.planning.calibration.throughputs import Calibration
from jobs.planning.run_plan import plan_run
from jobs.planning.step_plan import StepPlan
from jobs.planning.stored_plan import stored_calibration
from jobs.planning.volumes.pipeline_volumes import spark_volumes
from jobs.planning.volumes.step_volume import Volume
from jobs.planning.volumes.workload import Workload, run_workload
from pipeline.runs.names import (
    COMMITS_FOLDER,
    FEATURES_FOLDER,
    PARTITIONS_FOLDER,
    SELECTION_FOLDER,
    TARGETS_FOLDER,
)
from training.settings.recipe import Recipe

FOLDERS = {
    SELECT_UTTERANCES: SELECTION_FOLDER,
    EXTRACT_FEATURES: FEATURES_FOLDER,
    GENERATE_TARGETS: TARGETS_FOLDER,
    REPARTITION: PARTITIONS_FOLDER,
}
"""The folder below the run into which each step of the data pipeline writes."""

REQUESTS = ("get", "put", "head", "list")

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
        step: _compare(store, run_uri, step, records[step], volumes.get(step), plans.get(step))
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
    run_uri: str,
    step: str,
    record: Mapping[str, Any],
    volume: Volume | None,
    plan: StepPlan | None,
) -> Comparison:
    comparison: Comparison = {}
    if volume is not None:
        found = store.list(join_uri(run_uri, FOLDERS[step]))
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
    return float(sum(counts[kind] for kind in REQUESTS)) if counts else None


def _pair(planned: float | None, actual: float | None) -> dict[str, float | None]:
    return {"planned": planned, "actual": actual}
