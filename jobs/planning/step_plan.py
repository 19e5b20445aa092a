"""The plan of each step: volumes times unit costs, on the step's own cluster."""

from dataclasses import dataclass
from math import ceil, inf

from infra.cluster import Cluster
from jobs.planning.calibration.throughputs import Calibration, CoreRates, StoreRates
from jobs.planning.prices import S3_STANDARD
from jobs.planning.volumes.step_volume import Volume, Work

SPARK_START_S = 6.0
"""A Spark session's start; torchrun's ranks take about as long."""

S3_READS_PER_PREFIX_S = 5_500
"""What S3 serves of one partitioned prefix (AWS's documentation)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step takes; `bound` names what its wall-clock time waits for."""

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

    @property
    def gets_per_s(self) -> float:
        """GETs a second, on the mean."""
        return self.volume.requests.get / self.wall_seconds

    @property
    def dollars(self) -> float:
        """Instances and requests."""
        return self.instance_dollars + self.request_dollars


def core_seconds(work: Work, rates: CoreRates) -> float:
    """Seconds that one core needs for this work."""
    return (
        work.metadata_records / rates.metadata_records_per_s
        + work.extracted_seconds / rates.extraction_x_real_time
        + work.labelled_seconds / rates.targets_x_real_time
        + work.repartitioned_seconds / rates.repartition_x_real_time
        + work.kbest_logits / rates.kbest_logits_per_s
    )


def num_devices(cluster: Cluster) -> int:
    """Devices of a cluster: its hosts' lists, or one for each rank that torchrun starts."""
    return max(cluster.num_instances * len(cluster.devices), cluster.num_executors)


def plan_spark_step(
    step: str,
    volume: Volume,
    cluster: Cluster,
    calibration: Calibration,
    gets_in_flight: int = 1,
    device_seconds: float = 0.0,
) -> StepPlan:
    """A step of equal tasks, in waves over the cluster's cores, or as fast as its devices."""
    busy = core_seconds(volume.work, calibration.core)
    if not cluster.is_local:
        busy += volume.requests.total * calibration.store.request_core_seconds
    slots = cluster.num_executors * cluster.cores_per_executor
    # Equal tasks run in waves; a busy task waits for its shards, and its small reads go on beside.
    rounds = ceil(volume.tasks / slots) / max(volume.tasks, 1)
    in_turn, beside = _waits(volume, cluster, calibration.store, gets_in_flight)
    bounds = {
        "cores": rounds * (busy + in_turn),
        "S3 latency": rounds * (beside + in_turn),
        "network": _network_seconds(volume, cluster, calibration.store),
        "devices": device_seconds / num_devices(cluster),
    }
    return _plan(step, volume, cluster, busy, device_seconds, bounds)


def plan_training_step(
    step: str, volume: Volume, cluster: Cluster, calibration: Calibration, device_seconds: float
) -> StepPlan:
    """A training step: its devices' seconds, evenly dealt."""
    bounds = {
        "devices": device_seconds / num_devices(cluster),
        "network": _network_seconds(volume, cluster, calibration.store),
    }
    return _plan(step, volume, cluster, 0.0, device_seconds, bounds)


def _plan(
    step: str,
    volume: Volume,
    cluster: Cluster,
    busy: float,
    device_seconds: float,
    bounds: dict[str, float],
) -> StepPlan:
    bound = max(bounds, key=lambda name: bounds[name])
    wall = SPARK_START_S + bounds[bound]
    hours = wall / 3600
    return StepPlan(
        step=step,
        volume=volume,
        instance_type=cluster.instance_type,
        instances=cluster.num_instances,
        core_seconds=busy,
        device_seconds=device_seconds,
        wall_seconds=wall,
        bound=bound,
        instance_dollars=cluster.num_instances * cluster.price_per_instance_hour * hours,
        request_dollars=0.0 if cluster.is_local else S3_STANDARD.requests(volume.requests),
    )


def _waits(
    volume: Volume, cluster: Cluster, store: StoreRates, in_flight: int
) -> tuple[float, float]:
    """Seconds that all tasks wait for S3: in turn with their work, and beside it."""
    if cluster.is_local:
        return 0.0, 0.0
    beside = volume.small_reads * store.request_seconds / in_flight
    large = volume.requests.get - volume.small_reads + volume.requests.put
    moved = volume.bytes_written + (0 if volume.small_reads else volume.bytes_read)
    return large * store.request_seconds + moved / store.bytes_per_s, beside


def _network_seconds(volume: Volume, cluster: Cluster, store: StoreRates) -> float:
    if cluster.is_local:
        return 0.0
    gbit_per_s = store.instance_gbit_per_s.get(cluster.instance_type, inf)
    # Both ways at once: the busier way decides.
    busier = max(volume.bytes_read, volume.bytes_written)
    return busier * 8e-9 / (gbit_per_s * cluster.num_instances)
