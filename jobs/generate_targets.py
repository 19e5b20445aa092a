"""Label frames with the teacher's k best logits (003 IV-B3, V-C).

megahour generate_targets --recipe demo --run runs/demo
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from infra.devices.device_pool import DevicePool
from infra.settings import canonical_json
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.run_table import GENERATE_TARGETS
from pipeline.kbest import joined
from pipeline.runs.engine import Distribute, StepResult
from pipeline.runs.manifest import is_finished, subsets_of_run
from pipeline.runs.names import (
    DEV,
    TARGETS_GRAPH_STEP,
    TARGETS_TUNING_STEP,
    TEACHER,
    TargetsRound,
    features_step,
    labelling_models,
    model_step,
    targets_rounds,
)
from pipeline.steps.targets import AudioSource, FeatureSource, FrameSource, generate_targets
from training.align.network_alignment import read_tree
from training.evaluate.slices import ModelsToDecode
from training.evaluate.tuning import tune
from training.settings.decoding import OwnTeacherConfig
from training.targets.lattice_targets import build_target_graph, open_lattice_teacher
from training.targets.own_teacher import check_untrained
from training.targets.teacher import PooledTeacher, kept_logits, kept_targets

IDLE_TIMEOUT_S = 20.0
SEARCH_IDLE_TIMEOUT_S = 120.0
"""Between two requests, each task decodes the utterances of one to lattices."""


def run(job: Job) -> StepResults:
    """Label all unlabelled feature shards, in each round whose teachers are trained."""
    with distribute_on_spark(job) as distribute:
        if job.recipe.targets.source == "lattice":
            return label_with_lattices(job, distribute)
        return [
            label_by_logits(job, distribute, targets_round, models)
            for targets_round, models in due_rounds(job)
        ]


def due_rounds(job: Job) -> Iterator[tuple[TargetsRound, Sequence[str]]]:
    """Yield the first round, and each later one whose teachers are trained, with its models."""
    recipe = job.recipe
    trained_on, ensemble = recipe.sequence_training.models, recipe.num_teachers
    for each in targets_rounds(recipe.targets.rounds):
        models = labelling_models(trained_on, ensemble, each)
        trained = (is_finished(job.store, job.run_uri, model_step(name)) for name in models)
        if each.number == 1 or all(trained):
            yield each, models


def label_by_logits(
    job: Job, distribute: Distribute, targets_round: TargetsRound, models: Sequence[str]
) -> StepResult:
    """Label with the servers of the teachers, one a device."""
    config = job.recipe.targets
    columns = {"k": str(config.k), "tail_samples": str(config.tail_samples)}
    labels = labels_of(job, models)
    pool = DevicePool(
        factory=labels.targets,
        arguments={**columns, **labels.arguments},
        devices=job.cluster.devices,
        batch_frames=config.request_frames,
        idle_timeout_s=IDLE_TIMEOUT_S,
    )
    teacher = PooledTeacher(pool, config.windows, partial(kept_targets, config), joined)
    budget = job.recipe.loss_budget
    label = job.store, job.run_uri, config, teacher, distribute, models, (), budget, targets_round
    return generate_targets(*label, labels.source)


def label_with_lattices(job: Job, distribute: Distribute) -> StepResults:
    """Build the graph of the teachers' search, then label by the servers' logits and lattices."""
    recipe, where = job.recipe, (job.store, job.run_uri)
    config = recipe.targets
    made = tune_search(job, distribute)
    tuned_model = first_model(job) if made else ""
    place = *where, job.corpus_uri
    made.append(build_target_graph(*place, recipe.evaluation, config.lattices, tuned_model))
    limits = (TARGETS_GRAPH_STEP,), recipe.loss_budget
    for targets_round, models in due_rounds(job):
        labels = labels_of(job, models)
        pool = DevicePool(
            factory=labels.logits,
            arguments=labels.arguments,
            devices=job.cluster.devices,
            batch_frames=config.request_frames,
            idle_timeout_s=SEARCH_IDLE_TIMEOUT_S,
        )
        score = PooledTeacher(pool, config.windows, kept_logits, np.concatenate)
        teacher = open_lattice_teacher(
            job.store, job.run_uri, score, config.k, config.lattices, config.tail_samples
        )
        label = *where, config, teacher, distribute, models, *limits, targets_round
        made.append(generate_targets(*label, labels.source))
    return made


def tune_search(job: Job, distribute: Distribute) -> list[StepResult]:
    """Tune the search of the first teacher where the run has development speakers for that.

    Tuning decodes by models of the run: the search of a teacher of the user's own has the settings
    of the recipe.
    """
    recipe, place = job.recipe, (job.store, job.run_uri)
    has_development = DEV in subsets_of_run(*place, features_step)
    is_tuned = recipe.targets.lattices.are_tuned and recipe.num_teachers > 0
    if not (has_development and is_tuned):
        return []
    models = ModelsToDecode({first_model(job): recipe.models.of(TEACHER)}, distribute)
    settings = recipe.evaluation, recipe.tuning
    return [tune(*place, job.corpus_uri, *settings, models, TARGETS_TUNING_STEP)]


def first_model(job: Job) -> str:
    """Name the model that labels alone, or first of an ensemble, in the first round."""
    recipe = job.recipe
    return labelling_models(recipe.sequence_training.models, recipe.num_teachers)[0]


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels names the functions whose servers answer `targets` or `logits`, and their arguments.

    `source` reads what these teachers hear.
    """

    targets: str
    logits: str
    arguments: Mapping[str, str]
    source: FrameSource


def labels_of(job: Job, models: Sequence[str]) -> Labels:
    """Return the servers of the run's teachers, or without any those of the user's own."""
    own = job.recipe.targets.teacher
    if models:
        form = canonical_json(job.recipe.models.of(TEACHER))
        arguments = {"run_uri": job.run_uri, "form": form, "models": ",".join(models)}
        served = "training.targets.teacher:serve_teacher", "training.targets.teacher:serve_logits"
        return Labels(*served, arguments, FeatureSource())
    assert isinstance(own, OwnTeacherConfig), "else models label"
    is_audio = check_untrained(own) == "audio"
    heard = AudioSource(job.store, job.corpus_uri, job.recipe.features.conversion)
    source = heard if is_audio else FeatureSource()
    # The targets are senones of the run's tree, whatever the teacher knows.
    num_senones = str(read_tree(job.store, job.run_uri).num_senones)
    module = "training.targets.own_teacher"
    arguments = {"teacher": canonical_json(own), "num_senones": num_senones}
    return Labels(f"{module}:serve_own_teacher", f"{module}:serve_own_logits", arguments, source)


STEP = Step(
    name=GENERATE_TARGETS,
    description="Label every frame of the unlabelled features with the teacher's k best logits "
    "(paper 003 IV-B3, V-C), at one offset of each utterance or at all three (targets.offsets). "
    "Several teachers (teacher.ensemble) label with the mean of their posteriors. "
    "With targets.teacher.factory functions of yours label, by the features or the audio, and the "
    "run trains no teacher. Each host starts "
    "one server process for each device that the cluster file names; its tasks share them. With "
    "targets.source = 'lattice' each task also decodes its utterances with the language model of "
    "the evaluation, at settings tuned on the development speakers where the corpus has some, and "
    "the lattices' state posteriors enter the targets. An utterance without a "
    "lattice keeps the teacher's own; loss_budget bounds how many these may be. Of several rounds "
    "(targets.rounds) it makes those whose teachers are trained.",
    run=run,
)

if __name__ == "__main__":
    main(STEP)
