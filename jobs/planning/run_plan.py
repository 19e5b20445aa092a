"""Plan the time and the cost of each step of a run, in order, and sum them.

A step takes its volume times the unit costs of a calibration, on its own cluster, whose file has
the prices of instances. The prices of requests and storage are here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from infra.cluster import Cluster
from jobs.planning.calibration import Calibration, CoreRates, SearchRates, StoreRates
from jobs.planning.volumes import (
    bootstrap,
    decoding,
    lattices,
    low_rate_frames,
    num_target_frames,
    num_training_frames,
    num_tuned_settings,
    num_validation_frames,
    realignment,
    shard_by_shard,
    spark_volumes,
    training_volume,
)
from jobs.planning.workload import Requests, Subset, Volume, Work, Workload
from jobs.run_table import (
    ALIGN,
    EVALUATE,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    REPARTITION,
    SELECT_UTTERANCES,
    STEPS,
    TRAIN_BASELINE,
    TRAIN_STUDENT,
    TRAIN_TEACHER,
    Step,
)
from pipeline.runs.names import (
    ALIGNER,
    DEV,
    HELDOUT,
    LABELLED,
    STUDENT,
    TEACHER,
    UNLABELLED,
    evaluated_models,
    realignment_rounds,
    section_of,
)
from training.fit.model_specs import Fit, aligner_fit
from training.models.parameter_count import num_parameters
from training.settings.recipe import Recipe

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class StorePrices:
    """StorePrices holds US dollars for 1,000 requests of a kind, and for a gigabyte a month."""

    source: str
    put_per_1000: float
    list_per_1000: float
    get_per_1000: float
    head_per_1000: float
    gigabyte_month: float

    def requests(self, requests: Requests) -> float:
        """Return the dollars that these requests cost."""
        thousands = (
            requests.put * self.put_per_1000
            + requests.list * self.list_per_1000
            + requests.get * self.get_per_1000
            + requests.head * self.head_per_1000
        )
        return thousands / 1000

    def month(self, num_bytes: float) -> float:
        """Return the dollars that storing so many bytes for a month costs."""
        return num_bytes / GIGABYTE * self.gigabyte_month


S3_STANDARD = StorePrices(
    source="aws.amazon.com/s3/pricing, S3 Standard, us-east-1, list prices of 2025; "
    "storage at the rate above 50 TB",
    put_per_1000=0.005,
    list_per_1000=0.005,
    get_per_1000=0.0004,
    head_per_1000=0.0004,
    gigabyte_month=0.022,
)


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


BESIDE_THE_PIPELINE = (ALIGN, TRAIN_BASELINE, TRAIN_TEACHER, EVALUATE)
"""The planned steps that the paper's 12 days do not contain; the teacher is trained before."""

FORWARD_SHARE = 1 / 3
"""Assumed: the forward pass is a third of training's arithmetic."""

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
    volumes = spark_volumes(workload, recipe)
    for step in STEPS.values():
        if step.starter == "python":
            continue
        planned = _Planned(workload, recipe, calibration, cluster_of(step.name), volumes, step)
        parts = _PARTS.get(step.name, _Planned.by_hours)(planned)
        if parts:
            found.append(in_turn(parts))
    return RunPlan(workload, tuple(found))


@dataclass(frozen=True, slots=True)
class _Planned:
    """_Planned is a step to plan; its methods return the plans of its parts, if it has any."""

    workload: Workload
    recipe: Recipe
    calibration: Calibration
    cluster: Cluster
    volumes: Mapping[str, Volume]
    step: Step

    def by_volume(self) -> list[StepPlan]:
        """Plan a step of the data pipeline by its volume."""
        is_extraction = self.step.name == EXTRACT_FEATURES
        gets = self.recipe.features.gets_in_flight if is_extraction else 1
        return [self._tasks(self.volumes[self.step.name], gets_in_flight=gets)]

    def by_hours(self) -> list[StepPlan]:
        """Plan a step of which only the hours are known that its tasks read.

        It has a task a feature shard, reads as many bytes as features have, and writes as many.
        """
        parts = []
        for written in self.step.writes(self.recipe):
            name = written.hours_of.rpartition("/")[2]
            for subset in (each for each in self.workload.subsets if each.name == name):
                seconds = subset.hours * 3600 / self.step.x_real_time
                volume = shard_by_shard(subset, self.recipe)
                parts.append(self._tasks(volume, scoring_seconds=seconds))
        return parts

    def alignment(self) -> list[StepPlan]:
        """Plan the bootstrap, and in each round a network on one rank and tasks that realign."""
        if not (labelled := self._subset(LABELLED)):
            return []
        parts = [self._ranks(bootstrap(labelled, self.recipe), 0.0, 1)]
        rounds = realignment_rounds(self.recipe.alignment.rounds)
        for each in rounds:
            parts.append(self._fitted(aligner_fit(self.recipe, each), 1))
            # Development speakers are aligned once, by the last network.
            names = (LABELLED, DEV) if each == rounds[-1] else (LABELLED,)
            for subset in (found for found in self.workload.subsets if found.name in names):
                scoring = self._forward_seconds(ALIGNER, subset)
                parts.append(self._tasks(realignment(subset, self.recipe), scoring_seconds=scoring))
        return parts

    def training(self) -> list[StepPlan]:
        """Plan the models one after the other; where sMBR follows, its lattices, too."""
        labelled = self._subset(LABELLED)
        if not labelled and self.step.trains != STUDENT:
            return []
        ranks, parts = num_devices(self.cluster), list[StepPlan]()
        for written in self.step.writes(self.recipe):
            if written.fit is not None:
                parts.append(self._fitted(written.fit, ranks))
            elif labelled:
                scoring = self._forward_seconds(written.name.rpartition("/")[2], labelled)
                parts.append(self._ranks(lattices(labelled, self.recipe), scoring, ranks))
        return parts

    def labelling(self) -> list[StepPlan]:
        """Plan the teachers' forward passes behind the device pool, and the k best selected."""
        recipe, rates = self.recipe, self.calibration
        counts = self.workload.hours(UNLABELLED), self.workload.utterances(UNLABELLED)
        frames = num_target_frames(*counts, recipe.targets.offsets)
        senones, rounds = recipe.senones.max_senones, recipe.targets.rounds
        rate = rates.device(self.cluster.instance_type).teacher_forward
        # The cost of a user-supplied teacher is unknown: it is planned as the recipe's model.
        passes = (recipe.num_labelling + (rounds - 1) * recipe.num_siblings) * frames
        forward = passes / rate.of(num_parameters(recipe.models.teacher, senones))
        forward /= rates.pool.efficiency
        # A device's one server selects the k best once for all of an ensemble, on one core.
        selecting = rounds * frames * senones / rates.core.kbest_logits_per_s
        volume = self.volumes[self.step.name]
        if not self.cluster.has_gpus:
            seconds = forward + selecting
        elif recipe.targets.tail_samples:
            seconds = max(forward, selecting)
        else:
            # A GPU selects itself, in less than a hundredth of a teacher's forward pass.
            seconds = forward
            volume = replace(volume, work=replace(volume.work, kbest_logits=0))
        return [self._tasks(volume, device_seconds=seconds)]

    def evaluation(self) -> list[StepPlan]:
        """Plan tuning on the development speakers, if any, and decoding of the held-out ones."""
        if not self.workload.hours(HELDOUT):
            return []
        recipe = self.recipe
        names = evaluated_models(
            recipe.sequence_training.models, recipe.num_teachers, recipe.targets.rounds
        )
        settings = {DEV: num_tuned_settings(recipe), HELDOUT: 1}
        parts = []
        for subset in (each for each in self.workload.subsets if each.name in settings):
            volume = decoding(subset, recipe, len(names), settings[subset.name])
            scoring = sum(self._forward_seconds(name, subset) for name in names)
            parts.append(self._tasks(volume, scoring_seconds=scoring))
        return parts

    def _tasks(
        self,
        volume: Volume,
        gets_in_flight: int = 1,
        device_seconds: float = 0.0,
        scoring_seconds: float = 0.0,
    ) -> StepPlan:
        return plan_spark_step(
            self.step.name,
            volume,
            self.cluster,
            self.calibration,
            gets_in_flight,
            device_seconds,
            scoring_seconds,
        )

    def _ranks(self, volume: Volume, device_seconds: float, num_ranks: int) -> StepPlan:
        name, rates = self.step.name, self.calibration
        return plan_training_step(name, volume, self.cluster, rates, device_seconds, num_ranks)

    def _fitted(self, fit: Fit, num_ranks: int) -> StepPlan:
        """Plan the sub-epochs of one fit, and newbob's validations after them."""
        senones = self.recipe.senones.max_senones
        rates = self.calibration.device(self.cluster.instance_type)
        is_teacher = fit.model == self.recipe.models.teacher
        rate = rates.teacher_training if is_teacher else rates.student_training
        frames_per_s = rate.of(num_parameters(fit.model, senones))
        kept = rates.trainer_efficiency.get(fit.training.trainer.name, 1.0)
        seconds = num_training_frames(fit, self.workload) / frames_per_s / kept
        seconds += FORWARD_SHARE * num_validation_frames(fit, self.workload) / frames_per_s
        volume = training_volume(fit, self.workload, self.recipe, num_ranks, senones)
        return self._ranks(volume, seconds, num_ranks)

    def _forward_seconds(self, name: str, subset: Subset) -> float:
        """Return the seconds in which one device scores a subset by a model."""
        rates = self.calibration.device(self.cluster.instance_type)
        frames, senones = low_rate_frames(subset), self.recipe.senones.max_senones
        models = self.recipe.models
        if section_of(name) == TEACHER:
            return frames / rates.teacher_forward.of(num_parameters(models.teacher, senones))
        size = num_parameters(models.student, senones)
        return FORWARD_SHARE * frames / rates.student_training.of(size)

    def _subset(self, name: str) -> Subset | None:
        return next((each for each in self.workload.subsets if each.name == name), None)


_PARTS: Mapping[str, Callable[[_Planned], list[StepPlan]]] = {
    SELECT_UTTERANCES: _Planned.by_volume,
    EXTRACT_FEATURES: _Planned.by_volume,
    ALIGN: _Planned.alignment,
    TRAIN_BASELINE: _Planned.training,
    TRAIN_TEACHER: _Planned.training,
    GENERATE_TARGETS: _Planned.labelling,
    REPARTITION: _Planned.by_volume,
    TRAIN_STUDENT: _Planned.training,
    EVALUATE: _Planned.evaluation,
}
"""How the steps are planned of which more is known than their hours."""
