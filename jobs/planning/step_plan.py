"""Plan one step: its volume times unit costs, on its own cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from infra.cluster import Cluster
from jobs.planning.calibration.throughputs import Calibration, CoreRates, SearchRates, StoreRates
from jobs.planning.prices import S3_STANDARD
from jobs.planning.volumes.step_volume import Volume, Work

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


def core_seconds(work: Work, rates: CoreRates) -> float:
    """Return the seconds that one core needs for this work."""
    return (
        work.metadata_records / rates.metadata_records_per_s
        + work.extracted_seconds / rates.extraction_x_real_time
        + work.labelled_seconds / rates.targets_x_real_time
        + work.repartitioned_seconds / rates.repartition_x_real_time
        + work.kbest_logits / rates.kbest_logits_per_s
    )


def search_seconds(work: Work, rates: SearchRates) -> float:
    """Return the seconds that one core searches graphs and lattices, without the network."""
    return (
        work.bootstrapped_seconds / rates.bootstrap_x_real_time
        + work.aligned_seconds / rates.alignment_x_real_time
        + work.lattice_seconds / rates.lattices_x_real_time
        + work.decoded_seconds / rates.decoding_x_real_time
        + work.sequence_frames / rates.sequence_frames_per_s
    )


def augmentation_seconds(work: Work, rates: SearchRates) -> float:
    """Return the seconds that readers augment, beside the training steps."""
    return work.speed_frames / rates.speed_frames_per_s + work.mask_frames / rates.mask_frames_per_s


def num_devices(cluster: Cluster) -> int:
    """Count the devices of a cluster: those of its hosts, or one for each rank of torchrun."""
    return max(cluster.num_devices, cluster.num_executors)


def plan_spark_step(
    step: str,
    volume: Volume,
    cluster: Cluster,
    calibration: Calibration,
    gets_in_flight: int = 1,
    device_seconds: float = 0.0,
    scoring_seconds: float = 0.0,
) -> StepPlan:
    """Plan a step of equal tasks, in waves over the cores, or bound by the devices.

    Tasks that score speech by a network of their own take a core's `scoring_seconds`.
    """
    busy = core_seconds(volume.work, calibration.core) + scoring_seconds
    busy += search_seconds(volume.work, calibration.search)
    if not cluster.is_local:
        busy += volume.requests.total * calibration.store.request_core_seconds
    slots = cluster.num_executors * cluster.cores_per_executor
    # Equal tasks run in waves. A task waits for its shards; its small reads overlap its work.
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
    step: str,
    volume: Volume,
    cluster: Cluster,
    calibration: Calibration,
    device_seconds: float,
    num_ranks: int,
) -> StepPlan:
    """Plan a training step, whose work is equal on all ranks, each with a device and a core.

    A rank searches between what its device does, and reads and augments beside it.
    """
    searching = search_seconds(volume.work, calibration.search)
    augmenting = augmentation_seconds(volume.work, calibration.search)
    bounds = {
        "devices" if device_seconds >= searching else "cores": (device_seconds + searching)
        / num_ranks,
        "reader": augmenting / num_ranks,
        "network": _network_seconds(volume, cluster, calibration.store),
    }
    return _plan(step, volume, cluster, searching + augmenting, device_seconds, bounds)


def in_turn(parts: Sequence[StepPlan]) -> StepPlan:
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
        spilled_bytes=_spilled_bytes(volume, cluster),
        disk_gibibytes=cluster.disk_gibibytes,
    )


def _spilled_bytes(volume: Volume, cluster: Cluster) -> float:
    """Return what the tasks of one instance spill at once: repartition, all that they read."""
    if not volume.work.repartitioned_seconds:
        return 0.0
    at_once = min(cluster.executors_per_instance * cluster.cores_per_executor, volume.tasks)
    return at_once * volume.bytes_read / volume.tasks


def _waits(
    volume: Volume, cluster: Cluster, store: StoreRates, in_flight: int
) -> tuple[float, float]:
    """Return the seconds that all tasks wait for S3: between their work, and beside it."""
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
