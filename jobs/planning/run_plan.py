"""Plan all steps of a run in order, and sum them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.cluster import Cluster
from jobs.cli.catalogue import (
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    REPARTITION,
    SELECT_UTTERANCES,
    TRAIN_BASELINE,
    TRAIN_STUDENT,
    TRAIN_TEACHER,
)
from jobs.planning.calibration.throughputs import Calibration
from jobs.planning.step_plan import StepPlan, num_devices, plan_spark_step, plan_training_step
from jobs.planning.volumes.pipeline_volumes import spark_volumes
from jobs.planning.volumes.shard_sizes import num_target_frames
from jobs.planning.volumes.step_volume import Volume
from jobs.planning.volumes.training_volumes import (
    num_training_frames,
    training_volume,
)
from jobs.planning.volumes.workload import Workload
from pipeline.runs.names import LABELLED, TEACHER, UNLABELLED
from training.fit.model_specs import Fit, baseline_fit, student_fit, teacher_fits
from training.models.registry import num_parameters
from training.recipes import Recipe

STUDENT_PIPELINE = (
    SELECT_UTTERANCES,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    REPARTITION,
    TRAIN_STUDENT,
)
"""The steps that the paper's 12 days contain; the teacher is trained before."""

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

    def spark(step: str, device_seconds: float = 0.0) -> StepPlan:
        gets = in_flight.get(step, 1)
        return plan_spark_step(
            step, volumes[step], cluster_of(step), calibration, gets, device_seconds
        )

    def train(step: str, fits: Sequence[Fit]) -> StepPlan:
        return _training_step(step, fits, workload, recipe, cluster_of(step), calibration)

    labelling = _teacher_seconds(workload, recipe, calibration, cluster_of(GENERATE_TARGETS))
    steps = [spark(SELECT_UTTERANCES), spark(EXTRACT_FEATURES)]
    if workload.hours(LABELLED):
        steps.append(train(TRAIN_BASELINE, [baseline_fit(recipe)]))
        steps.append(train(TRAIN_TEACHER, teacher_fits(recipe)))
    steps += [spark(GENERATE_TARGETS, labelling), spark(REPARTITION)]
    steps.append(train(TRAIN_STUDENT, [student_fit(recipe)]))
    return RunPlan(workload, tuple(steps))


def _teacher_seconds(
    workload: Workload, recipe: Recipe, calibration: Calibration, cluster: Cluster
) -> float:
    counts = workload.hours(UNLABELLED), workload.utterances(UNLABELLED)
    frames = num_target_frames(*counts, recipe.targets.offsets)
    senones = recipe.senones.max_senones
    rate = calibration.device(cluster.instance_type).teacher_forward
    forward = frames / rate.of(num_parameters(recipe.models.teacher, senones))
    # A device's one server selects the k best once for all of an ensemble, on one core.
    selecting = frames * senones / calibration.core.kbest_logits_per_s
    return recipe.teacher.ensemble * forward + selecting


def _training_step(
    step: str,
    fits: Sequence[Fit],
    workload: Workload,
    recipe: Recipe,
    cluster: Cluster,
    calibration: Calibration,
) -> StepPlan:
    """Plan the training of models of one form, one after the other."""
    fit = fits[0]
    ranks, senones = num_devices(cluster), recipe.senones.max_senones
    rates = calibration.device(cluster.instance_type)
    rate = rates.teacher_training if fit.name == TEACHER else rates.student_training
    frames_per_s = rate.of(num_parameters(fit.model, senones))
    kept = rates.trainer_efficiency.get(fit.trainer.name, 1.0)
    seconds = sum(num_training_frames(each, workload) for each in fits) / frames_per_s / kept
    volumes = [training_volume(each, workload, recipe, ranks, senones) for each in fits]
    volume = sum(volumes, Volume())
    return plan_training_step(step, volume, cluster, calibration, seconds)
