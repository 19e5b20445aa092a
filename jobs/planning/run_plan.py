"""Plan the time and the cost of each step of a run, in order, and sum them.

A step takes its volume times the unit costs of a calibration, on its own cluster, whose file has
the prices of instances. The prices of requests and storage are here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from infra.cluster import Cluster
from jobs.cli.catalogue import (
    ALIGN,
    EVALUATE,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    REPARTITION,
    SELECT_UTTERANCES,
    TRAIN_BASELINE,
    TRAIN_STUDENT,
    TRAIN_TEACHER,
)
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
    spark_volumes,
    training_volume,
)
from jobs.planning.workload import Requests, Subset, Volume, Work, Workload
from pipeline.runs.names import (
    ALIGNER,
    DEV,
    HELDOUT,
    LABELLED,
    TEACHER,
    UNLABELLED,
    evaluated_models,
    realignment_rounds,
    section_of,
)
from training.fit.model_specs import (
    Fit,
    aligner_fit,
    baseline_fit,
    sequence_fit,
    sibling_fits,
    student_fit,
    teacher_fits,
)
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


STUDENT_PIPELINE = (
    SELECT_UTTERANCES,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    REPARTITION,
    TRAIN_STUDENT,
)
"""The steps that the paper's 12 days contain; the teacher is trained before."""

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
        return tuple(step for step in self.steps if step.step in STUDENT_PIPELINE)

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
    """Plan each step for this workload and recipe, on the step's own cluster."""
    volumes = spark_volumes(workload, recipe)
    in_flight = {EXTRACT_FEATURES: recipe.features.gets_in_flight}

    def spark(step: str) -> StepPlan:
        gets = in_flight.get(step, 1)
        return plan_spark_step(step, volumes[step], cluster_of(step), calibration, gets)

    def train(step: str, fits: Sequence[Fit]) -> StepPlan:
        return _training_step(step, fits, workload, recipe, cluster_of(step), calibration)

    place = cluster_of(GENERATE_TARGETS), calibration
    labelling = _labelling(workload, recipe, volumes[GENERATE_TARGETS], *place)
    steps = [spark(SELECT_UTTERANCES), spark(EXTRACT_FEATURES)]
    if workload.hours(LABELLED):
        steps.append(_alignment(workload, recipe, cluster_of(ALIGN), calibration))
        steps.append(train(TRAIN_BASELINE, [baseline_fit(recipe)]))
        fits = [*teacher_fits(recipe), *sibling_fits(recipe)]
        if fits:
            steps.append(train(TRAIN_TEACHER, fits))
    steps += [labelling, spark(REPARTITION)]
    steps.append(train(TRAIN_STUDENT, [student_fit(recipe)]))
    if workload.hours(HELDOUT):
        steps.append(_evaluation(workload, recipe, cluster_of(EVALUATE), calibration))
    return RunPlan(workload, tuple(steps))


def _alignment(
    workload: Workload, recipe: Recipe, cluster: Cluster, calibration: Calibration
) -> StepPlan:
    """Plan the bootstrap, and in each round a network on one rank and the tasks that realign."""
    (labelled,) = (each for each in workload.subsets if each.name == LABELLED)
    parts = [plan_training_step(ALIGN, bootstrap(labelled, recipe), cluster, calibration, 0.0, 1)]
    rounds = realignment_rounds(recipe.alignment.rounds)
    for each in rounds:
        fit = aligner_fit(recipe, each)
        parts.append(_fitted(ALIGN, fit, workload, recipe, cluster, calibration, num_ranks=1))
        # Development speakers are aligned once, by the last network.
        names = (LABELLED, DEV) if each == rounds[-1] else (LABELLED,)
        for subset in (found for found in workload.subsets if found.name in names):
            scoring = _forward_seconds(ALIGNER, subset, recipe, cluster, calibration)
            volume = realignment(subset, recipe)
            parts.append(
                plan_spark_step(ALIGN, volume, cluster, calibration, scoring_seconds=scoring)
            )
    return in_turn(parts)


def _evaluation(
    workload: Workload, recipe: Recipe, cluster: Cluster, calibration: Calibration
) -> StepPlan:
    """Plan tuning on the development speakers, if any, and the decoding of the held-out ones."""
    names = evaluated_models(
        recipe.sequence_training.models, recipe.num_teachers, recipe.targets.rounds
    )
    settings = {DEV: num_tuned_settings(recipe), HELDOUT: 1}
    parts = []
    for subset in (each for each in workload.subsets if each.name in settings):
        volume = decoding(subset, recipe, len(names), settings[subset.name])
        scoring = sum(
            _forward_seconds(name, subset, recipe, cluster, calibration) for name in names
        )
        parts.append(
            plan_spark_step(EVALUATE, volume, cluster, calibration, scoring_seconds=scoring)
        )
    return in_turn(parts)


def _labelling(
    workload: Workload, recipe: Recipe, volume: Volume, cluster: Cluster, calibration: Calibration
) -> StepPlan:
    """Plan the teachers' forward passes behind the device pool, and the selection of the k best."""
    counts = workload.hours(UNLABELLED), workload.utterances(UNLABELLED)
    frames = num_target_frames(*counts, recipe.targets.offsets)
    senones, rounds = recipe.senones.max_senones, recipe.targets.rounds
    rate = calibration.device(cluster.instance_type).teacher_forward
    # Of a teacher of the user's own nothing is known: it is planned as the recipe's model.
    passes = (recipe.num_labelling + (rounds - 1) * recipe.num_siblings) * frames
    forward = passes / rate.of(num_parameters(recipe.models.teacher, senones))
    forward /= calibration.pool.efficiency
    # A device's one server selects the k best once for all of an ensemble, on one core.
    selecting = rounds * frames * senones / calibration.core.kbest_logits_per_s
    if not cluster.has_gpus:
        seconds = forward + selecting
    elif recipe.targets.tail_samples:
        seconds = max(forward, selecting)
    else:
        # A GPU selects itself, in less than a hundredth of a teacher's forward pass.
        seconds = forward
        volume = replace(volume, work=replace(volume.work, kbest_logits=0))
    return plan_spark_step(GENERATE_TARGETS, volume, cluster, calibration, device_seconds=seconds)


def _forward_seconds(
    name: str, subset: Subset, recipe: Recipe, cluster: Cluster, calibration: Calibration
) -> float:
    """Return the seconds in which one device scores a subset by a model."""
    rates, senones = calibration.device(cluster.instance_type), recipe.senones.max_senones
    frames = low_rate_frames(subset)
    if section_of(name) == TEACHER:
        return frames / rates.teacher_forward.of(num_parameters(recipe.models.teacher, senones))
    size = num_parameters(recipe.models.student, senones)
    return FORWARD_SHARE * frames / rates.student_training.of(size)


def _training_step(
    step: str,
    fits: Sequence[Fit],
    workload: Workload,
    recipe: Recipe,
    cluster: Cluster,
    calibration: Calibration,
) -> StepPlan:
    """Plan models of one form, one after the other; where sMBR follows, its lattices, too."""
    ranks = num_devices(cluster)
    place = workload, recipe, cluster, calibration, ranks
    parts = []
    for fit in fits:
        parts.append(_fitted(step, fit, *place))
        if section_of(fit.name) in recipe.sequence_training.models:
            (labelled,) = (each for each in workload.subsets if each.name == LABELLED)
            scoring = _forward_seconds(fit.name, labelled, recipe, cluster, calibration)
            volume = lattices(labelled, recipe)
            parts.append(plan_training_step(step, volume, cluster, calibration, scoring, ranks))
            parts.append(_fitted(step, sequence_fit(recipe, fit), *place))
    return in_turn(parts)


def _fitted(
    step: str,
    fit: Fit,
    workload: Workload,
    recipe: Recipe,
    cluster: Cluster,
    calibration: Calibration,
    num_ranks: int,
) -> StepPlan:
    """Plan the sub-epochs of one fit, and newbob's validations after them."""
    senones = recipe.senones.max_senones
    rates = calibration.device(cluster.instance_type)
    is_teacher = fit.model == recipe.models.teacher
    rate = rates.teacher_training if is_teacher else rates.student_training
    frames_per_s = rate.of(num_parameters(fit.model, senones))
    kept = rates.trainer_efficiency.get(fit.training.trainer.name, 1.0)
    seconds = num_training_frames(fit, workload) / frames_per_s / kept
    seconds += FORWARD_SHARE * num_validation_frames(fit, workload) / frames_per_s
    volume = training_volume(fit, workload, recipe, num_ranks, senones)
    return plan_training_step(step, volume, cluster, calibration, seconds, num_ranks)
