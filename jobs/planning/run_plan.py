"""Plan the time and the cost of each step of a run, store the plan, and compare it with the run.

The workload is planned from hours, or read from the run's metadata. A step takes its volume over
the rates of a calibration, on its own cluster, whose file has the prices of instances. The prices
of requests and storage are here.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Any

from infra.cluster import Cluster
from infra.settings import read_record
from infra.store.object_store import ObjectStore, join_uri
from infra.store.objects import ObjectInfo
from infra.task_metrics import REQUEST_KINDS
from jobs.planning.calibration import Calibration, StoreRates, json_object
from jobs.run_table import (
    BOOTSTRAP,
    EVALUATE,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    REALIGN,
    REPARTITION,
    SELECT_UTTERANCES,
    STEPS,
    TRAIN_ALIGNER,
    TRAIN_BASELINE,
    TRAIN_TEACHER,
    written_steps,
)
from jobs.volumes import ModelPass, Requests, Subset, Volume, Workload
from pipeline.records import Tally
from pipeline.runs.manifest import Output, manifest_uri, read_manifest
from pipeline.runs.names import (
    ALL_SUBSETS,
    COMMITS_FOLDER,
    DEV,
    HELDOUT,
    INGEST_STEP,
    LABELLED,
    METADATA_FOLDER,
    PLAN_CALIBRATION,
    PLAN_DOCUMENT,
    UNLABELLED,
    bucket_of,
    folder_of,
)
from pipeline.runs.sealed_json import NamedObject, naming, seal
from training.settings.recipe import Recipe

UTTERANCE_SECONDS = 3.6
"""Mean length of an utterance: 1e9 of them are 1e6 hours (003 I)."""

BUCKET_HOURS = 1_000
"""Planned hours of one speaker bucket: a task of selection then reads 1e6 records."""

METADATA_OBJECT_RECORDS = 100_000
"""Planned records of one metadata object: 20 MB."""

MAX_UTTERANCES_PER_REQUEST = 10_000
"""The largest recording of 512 MB has 9 h; its shortest utterances last 3 s."""

LABELLED_SHARE = 0.007
"""Labelled hours as a share of the unlabelled hours: 7,000 of 1e6 (003 VII-A)."""


def planned_workload(
    hours: float,
    labelled_hours: float,
    utterance_seconds: float = UTTERANCE_SECONDS,
    dev_hours: float = 0.0,
    heldout_hours: float = 0.0,
    utterances_per_request: float = 1.0,
) -> Workload:
    """Plan the subsets of a corpus before ingestion, all of whose metadata is selected."""
    if not 0 < hours <= 1e9:
        raise ValueError(f"hours = {hours}: need more than 0, at most 1e9")
    others = {LABELLED: labelled_hours, DEV: dev_hours, HELDOUT: heldout_hours}
    for name, some in others.items():
        if not 0 <= some <= 1e9:
            raise ValueError(f"{name} hours = {some}: need 0 or more, at most 1e9")
    if not 1 <= utterances_per_request <= MAX_UTTERANCES_PER_REQUEST:
        raise ValueError(
            f"utterances per request = {utterances_per_request}: need 1 to "
            f"{MAX_UTTERANCES_PER_REQUEST}, what memory holds of one request's audio"
        )
    subsets = []
    for name, some in {UNLABELLED: hours, **others}.items():
        if some:
            records = max(round(some * 3600 / utterance_seconds), 1)
            buckets = max(1, round(some / BUCKET_HOURS))
            objects = max(buckets, ceil(records / METADATA_OBJECT_RECORDS))
            subsets.append(Subset(name, records, objects, (some / buckets,) * buckets))
    return Workload(tuple(subsets), utterances_per_request=utterances_per_request)


def run_workload(store: ObjectStore, run_uri: str, budget_hours: float) -> Workload | None:
    """Read the subsets of a run, with `budget_hours` to select (0 = all); None before ingestion.

    Filters, speaker caps and bad records are left out.
    """
    if not store.exists(manifest_uri(run_uri, INGEST_STEP)):
        return None
    outputs = read_manifest(store, run_uri, INGEST_STEP).outputs
    by_subset = {
        name: [each for each in outputs if each.key.startswith(f"{METADATA_FOLDER}/{name}/")]
        for name in ALL_SUBSETS
    }
    metadata = [each for some in by_subset.values() for each in some]
    return Workload(
        tuple(
            ingested(name, some, budget_hours if name == UNLABELLED else 0.0)
            for name, some in by_subset.items()
            if some
        ),
        record_bytes=sum(each.num_bytes for each in metadata)
        / max(sum(each.utterances for each in metadata), 1),
    )


def ingested(name: str, metadata: Sequence[Output], budget_hours: float) -> Subset:
    """Return the subset that these metadata objects make."""
    hours: dict[str, float] = defaultdict(float)
    for each in metadata:
        hours[bucket_of(f"/{each.key}")] += each.tally.hours
    total = sum((each.tally for each in metadata), Tally())
    selected = budget_hours / total.hours if budget_hours and total.hours else 1.0
    in_order = tuple(hours[bucket] for bucket in sorted(hours))
    return Subset(name, total.utterances, len(metadata), in_order, min(selected, 1.0))


PRICES_SOURCE = (
    "aws.amazon.com/s3/pricing, S3 Standard, us-east-1, list prices of 2025; storage at the rate "
    "above 50 TB"
)
DOLLARS_A_GIGABYTE_MONTH = 0.022


def request_dollars(requests: Requests) -> float:
    """Return the dollars that these requests to S3 cost."""
    return 5e-6 * (requests.put + requests.list) + 4e-7 * (requests.get + requests.head)


SPARK_START_S = 6.0
"""The start of a Spark session, or of the ranks of torchrun, which take about as long."""

S3_READS_PER_PREFIX_S = 5_500
"""Reads a second that S3 serves from one partitioned prefix (documentation of AWS)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """StepPlan holds the cost of a step; `bound` names the resource that limits its speed.

    `spilled_bytes` is the most that an instance keeps on its local disk, of `disk_gibibytes`.
    """

    step: str
    volume: Volume
    instance_type: str
    instances: int
    core_seconds: float
    device_seconds: float
    wall_seconds: float
    bound: str
    instance_dollars: float
    request_dollars: float
    spilled_bytes: float
    disk_gibibytes: int

    @property
    def gets_per_s(self) -> float:
        """Return the mean number of GETs a second."""
        return self.volume.requests.get / self.wall_seconds

    @property
    def dollars(self) -> float:
        """Return the dollars of instances and requests."""
        return self.instance_dollars + self.request_dollars


def plan_part(step: str, volume: Volume, cluster: Cluster, calibration: Calibration) -> StepPlan:
    """Plan a step, or a part of one: its work, divided by rates, on what limits its speed."""
    store = calibration.store
    core, device = volume.core_seconds + calibration.core_seconds(volume.work), 0.0
    for each in volume.passes:
        seconds = _pass_seconds(each, volume, cluster, calibration)
        core, device = (core + seconds, device) if each.on_core else (core, device + seconds)
    if volume.num_ranks:
        # A rank searches between what its device does, and reads beside it.
        bounds = {"devices" if device >= core else "cores": (device + core) / volume.num_ranks}
    else:
        if not cluster.is_local:
            core += volume.requests.total * store.request_core_seconds
        # Equal tasks run in waves. A task waits for its shards; its small reads overlap its work.
        slots = cluster.num_executors * cluster.cores_per_executor
        rounds = ceil(volume.tasks / slots) / max(volume.tasks, 1)
        in_turn, beside = _waits(volume, cluster, store)
        bounds = {
            "cores": rounds * (core + in_turn),
            "S3 latency": rounds * (beside + in_turn),
            "devices": device / cluster.num_devices,
        }
    gbit_per_s = (
        inf if cluster.is_local else store.instance_gbit_per_s.get(cluster.instance_type, inf)
    )
    # Both ways at once: the busier way decides.
    busier = max(volume.bytes_read, volume.bytes_written)
    bounds["network"] = busier * 8e-9 / (gbit_per_s * cluster.num_instances)
    bound = max(bounds, key=lambda name: bounds[name])
    wall = SPARK_START_S + bounds[bound]
    hourly = cluster.num_instances * cluster.price_per_instance_hour
    at_once = min(cluster.executors_per_instance * cluster.cores_per_executor, volume.tasks)
    return StepPlan(
        step=step,
        volume=volume,
        instance_type=cluster.instance_type,
        instances=cluster.num_instances,
        core_seconds=core,
        device_seconds=device,
        wall_seconds=wall,
        bound=bound,
        instance_dollars=hourly * wall / 3600,
        request_dollars=0.0 if cluster.is_local else request_dollars(volume.requests),
        spilled_bytes=at_once * volume.bytes_read / max(volume.tasks, 1) if volume.spills else 0.0,
        disk_gibibytes=cluster.disk_gibibytes,
    )


def _pass_seconds(
    model: ModelPass, volume: Volume, cluster: Cluster, calibration: Calibration
) -> float:
    rates = calibration.device(cluster.instance_type)
    frames_per_s = getattr(rates, model.rate).of(model.num_parameters)
    if model.trainer:
        frames_per_s *= rates.trainer_efficiency.get(model.trainer, 1.0)
    elif not volume.num_ranks and not model.on_core:
        frames_per_s *= calibration.pool.efficiency  # tasks reach devices through a pool's servers
    return float(model.frames / frames_per_s)


def _waits(volume: Volume, cluster: Cluster, store: StoreRates) -> tuple[float, float]:
    """Return the seconds that all tasks wait for S3: between their work, and beside it."""
    if cluster.is_local:
        return 0.0, 0.0
    beside = volume.small_reads * store.request_seconds / volume.gets_in_flight
    large = volume.requests.get - volume.small_reads + volume.requests.put
    moved = volume.bytes_written + (0 if volume.small_reads else volume.bytes_read)
    return large * store.request_seconds + moved / store.bytes_per_s, beside


BESIDE_THE_PIPELINE = (
    *(BOOTSTRAP, TRAIN_ALIGNER, REALIGN),
    *(TRAIN_BASELINE, TRAIN_TEACHER, EVALUATE),
)
"""The planned steps that the paper's 12 days do not contain; the teacher is trained before."""

PAPER_HOURS = 1e6
PAPER_DAYS = {"data": 7.6, "student": 4.5, "student pipeline": 12.0}
"""End-to-end processing time of a million hours (003 VIII-B1, Figure 3): the project's goal."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """RunPlan holds the plans of all steps of a run, in order."""

    workload: Workload
    steps: tuple[StepPlan, ...]

    def student_pipeline(self) -> tuple[StepPlan, ...]:
        """Return the plans of the steps that the paper's 12 days contain."""
        return tuple(step for step in self.steps if step.step not in BESIDE_THE_PIPELINE)

    @property
    def days(self) -> float:
        """Return the wall-clock days of the student pipeline, one step after the other."""
        return sum(step.wall_seconds for step in self.student_pipeline()) / 86_400


def plan_run(
    workload: Workload,
    recipe: Recipe,
    calibration: Calibration,
    cluster_of: Callable[[str], Cluster],
) -> RunPlan:
    """Plan each step of the run table for this workload and recipe, on the step's own cluster.

    A step of one process, without Spark and ranks, is not planned.
    """
    found = list[StepPlan]()
    for step in STEPS.values():
        if step.starter == "python":
            continue
        cluster = cluster_of(step.name)
        volumes = step.volumes(workload, recipe, cluster)
        parts = [plan_part(step.name, each, cluster, calibration) for each in volumes]
        if parts:
            found.append(_in_turn(parts))
    return RunPlan(workload, tuple(found))


def _in_turn(parts: Sequence[StepPlan]) -> StepPlan:
    """Add the parts of one step, which its cluster runs one after the other."""
    longest = max(parts, key=lambda part: part.wall_seconds)
    return replace(
        longest,
        volume=sum((part.volume for part in parts), Volume()),
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in (
                "core_seconds",
                "device_seconds",
                "wall_seconds",
                "instance_dollars",
                "request_dollars",
            )
        },
    )


def stored_calibration(store: ObjectStore, run_uri: str) -> Calibration | None:
    """Read the calibration stored in a run; None if there is none."""
    uri = join_uri(run_uri, PLAN_CALIBRATION)
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


def compare_plan(
    store: ObjectStore,
    run_uri: str,
    recipe: Recipe,
    cluster_of: Callable[[str], Cluster],
    records: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Compare tasks, objects, bytes, requests and seconds with the plan; {} before ingestion.

    `records` are the summaries of the steps. Each quantity has its planned and its actual value,
    None where one is not known. Seconds are planned only if the run has a calibration.
    """
    workload = run_workload(store, run_uri, recipe.selection.hours)
    if workload is None:
        return {}
    calibration = stored_calibration(store, run_uri)
    planned = plan_run(workload, recipe, calibration, cluster_of).steps if calibration else ()
    plans, steps = {each.step: each for each in planned}, {}
    for step, record in records.items():
        plan, found = plans.get(step), {}
        if step in COUNTED:
            volumes = STEPS[step].volumes(workload, recipe, cluster_of(step))
            folder = join_uri(run_uri, folder_of(written_steps(recipe, step)[-1]))
            found = _compare_volume(sum(volumes, Volume()), store.list(folder), record)
            seconds = plan.core_seconds + plan.device_seconds if plan else None
            found["task seconds"] = _pair(seconds, record["task_seconds"])
        if found or plan:
            wall = plan.wall_seconds if plan else None
            steps[step] = found | {"seconds": _pair(wall, record["seconds"])}
    return {"calibrated_on": calibration.machine if calibration else None, "steps": steps}


COUNTED = (SELECT_UTTERANCES, EXTRACT_FEATURES, GENERATE_TARGETS, REPARTITION)
"""The steps whose tasks, objects, bytes and requests are compared: each has a folder of its own."""


def _compare_volume(
    volume: Volume, stored: Sequence[ObjectInfo], record: Mapping[str, Any]
) -> dict[str, Any]:
    actual = float(sum(record["requests"][kind] for kind in REQUEST_KINDS))
    return {
        "tasks": _pair(volume.tasks, sum(f"/{COMMITS_FOLDER}/" in each.uri for each in stored)),
        "objects": _pair(volume.objects, len(stored)),
        "bytes written": _pair(volume.bytes_written, sum(each.num_bytes for each in stored)),
        "requests": _pair(volume.requests.total, actual),
    }


def _pair(planned: float | None, actual: float | None) -> dict[str, float | None]:
    return {"planned": planned, "actual": actual}
