"""Plan all steps of a run in order, and sum them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
from jobs.planning.calibration.throughputs import Calibration
from jobs.planning.step_plan import (
    StepPlan,
    in_turn,
    num_devices,
    plan_spark_step,
    plan_training_step,
)
from jobs.planning.volumes.pipeline_volumes import spark_volumes
from jobs.planning.volumes.search_volumes import (
    bootstrap,
    decoding,
    lattices,
    low_rate_frames,
    num_tuned_settings,
    realignment,
)
from jobs.planning.volumes.shard_sizes import num_target_frames
from jobs.planning.volumes.step_volume import Volume
from jobs.planning.volumes.training_volumes import (
    num_training_frames,
    num_validation_frames,
    training_volume,
)
from jobs.planning.volumes.workload import Subset, Workload
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
    kept = rates.trainer_efficiency.get(fit.trainer.name, 1.0)
    seconds = num_training_frames(fit, workload) / frames_per_s / kept
    seconds += FORWARD_SHARE * num_validation_frames(fit, workload) / frames_per_s
    volume = training_volume(fit, workload, recipe, num_ranks, senones)
    return plan_training_step(step, volume, cluster, calibration, seconds, num_ranks)
