"""Label frames with the teacher's k best logits (003 IV-B3, V-C).

megahour generate_targets --recipe demo --run runs/demo
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from infra.devices.device_pool import DevicePool
from infra.settings import ConfigurationError, canonical_json
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job, require_unlabelled
from jobs.cli.spark_steps import distribute_on_spark
from jobs.run_table import GENERATE_TARGETS
from pipeline.kbest import joined
from pipeline.runs.engine import Distribute, StepResult
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    GRAPH_STEP,
    ONLY_ROUND,
    TARGETS_TUNING_STEP,
    TEACHER,
    UNLABELLED,
    TargetsRound,
    features_step,
    model_step,
    targets_rounds,
)
from pipeline.steps.audio_source import AudioSource
from pipeline.steps.features import WITH_HYPOTHESES
from pipeline.steps.ingestion import TRANSCRIPTS
from pipeline.steps.targets import (
    SEARCH_ENGINES,
    FeatureSource,
    FrameSource,
    TargetsSearch,
    Teacher,
    generate_targets,
)
from training.align.labelled import read_lexicon, read_tree
from training.evaluate.slices import ModelsToDecode
from training.evaluate.stored_graphs import BuiltGraphs
from training.evaluate.tuning import tune
from training.settings.decoding import (
    OwnTeacherConfig,
    search_of_targets,
    transcripts_tuning_settings,
)
from training.targets.lattice_targets import LatticeSearch, open_lattice_teacher, search_settings
from training.targets.own_teacher import check_untrained
from training.targets.teacher import PooledTeacher, kept_logits, kept_targets
from training.targets.text_normalization import check_language
from training.targets.transcript_targets import TranscriptPlace, open_transcript_teacher
from training.targets.transcript_tuning import TuningPlace, tune_transcripts, tuned_transcripts

IDLE_TIMEOUT_S = 20.0
SEARCH_IDLE_TIMEOUT_S = 120.0
"""Between two requests, each task decodes the utterances of one to lattices."""


def run(job: Job) -> StepResults:
    """Label all unlabelled feature shards, in each round whose teachers are trained."""
    require_unlabelled(job)
    if aligns(job):
        require_transcripts(job)
    with distribute_on_spark(job) as distribute:
        tuned, search = list[StepResult](), None
        if searches(job):
            tuned, search = tune_search(job, distribute), search_of(job)
        if aligns(job):
            tuned = prepare_alignment(job, distribute)
            search = alignment_of(job, tuned)
        made = [*tuned]
        for targets_round, models in due_rounds(job):
            labels = labels_of(job, models)
            result = generate_targets(
                job.store,
                job.run_uri,
                job.recipe.targets,
                teacher_of(job, labels, tuned),
                distribute,
                models,
                search=search,
                loss_budget=job.recipe.loss_budget,
                targets_round=targets_round,
                source=labels.source,
            )
            made.append(result)
        return made


def searches(job: Job) -> bool:
    """Return whether the targets are of lattices, which each task decodes."""
    return job.recipe.targets.source == "lattice"


def aligns(job: Job) -> bool:
    """Return whether the targets are of recognizers' transcripts, which each task aligns."""
    return job.recipe.targets.source == "transcripts"


def require_transcripts(job: Job) -> None:
    """Raise ConfigurationError if no recognizer heard anything in the unlabelled speech."""
    check_language(job.recipe.targets.transcripts.language)
    if not has_transcripts(job, UNLABELLED):
        features = features_step(UNLABELLED)
        remedy = f"ingest with {TRANSCRIPTS} NAME=URI or pred_text into a new --run"
        said = f"no utterance of {features} has what a recognizer heard"
        raise ConfigurationError(f"targets.source = 'transcripts': {said}: {remedy}")


def due_rounds(job: Job) -> Iterator[tuple[TargetsRound, Sequence[str]]]:
    """Yield the first round, and each later one whose teachers are trained, with its models."""
    for each in targets_rounds(job.recipe.targets.rounds):
        models = job.recipe.labelling_models(each)
        trained = (job.has(model_step(name)) for name in models)
        if each.number == 1 or all(trained):
            yield each, models


def tuned_model(job: Job) -> str:
    """Return the model by which the teachers' search is tuned, the first that labels, if it is.

    Without development speakers, and for a teacher of the user's own, the settings are the
    recipe's: tuning decodes by a model of the run.
    """
    recipe = job.recipe
    is_tuned = job.has_dev and recipe.targets.lattices.are_tuned and recipe.num_teachers > 0
    return recipe.labelling_models(ONLY_ROUND)[0] if is_tuned else ""


def tune_search(job: Job, distribute: Distribute) -> list[StepResult]:
    """Tune the settings of the teachers' search on the development speakers, if they are open."""
    if not (model := tuned_model(job)):
        return []
    recipe = job.recipe
    models = ModelsToDecode({model: recipe.models.of(TEACHER)}, distribute)
    step = TARGETS_TUNING_STEP
    return [tune(*job.place, recipe.evaluation, recipe.tuning, models, step)]


def search_of(job: Job) -> TargetsSearch:
    """Return what the targets depend on where they are of lattices."""
    reads = (GRAPH_STEP, *([TARGETS_TUNING_STEP] if tuned_model(job) else []))
    return TargetsSearch(reads, search_of_targets(job.recipe.targets, job.recipe.evaluation))


def prepare_alignment(job: Job, distribute: Distribute) -> list[StepResult]:
    """Choose thresholds on the development speakers, if recognizers heard some.

    A teacher of the user's own aligns by the recipe's: a model of the run is asked.
    """
    place, config = transcript_place(job), job.recipe.targets.transcripts
    if not (config.tuned and job.recipe.num_teachers and has_transcripts(job, DEV)):
        return []
    model = job.recipe.labelling_models(ONLY_ROUND)[0]
    settings = transcripts_tuning_settings(job.recipe.targets, job.recipe.evaluation)
    scale, form = settings["acoustic_scale"], job.recipe.models.of(TEACHER)
    tuning = TuningPlace(place, scale, model, form, own_lattices(job))
    return [tune_transcripts(tuning, settings, distribute)]


def own_lattices(job: Job) -> LatticeSearch | None:
    """Return what makes the lattices that say how far transcripts are trusted; None if none do."""
    config = job.recipe.targets
    if not config.needs_graph:
        return None
    run = (job.store, job.run_uri)
    settings = search_settings(*run, job.recipe.evaluation, config.lattices)
    return LatticeSearch(BuiltGraphs.of(*run), settings, config.lattices)


def alignment_of(job: Job, tuned: Sequence[StepResult]) -> TargetsSearch:
    """Return what the targets depend on where they are of recognizers' transcripts."""
    graph = [GRAPH_STEP] if job.recipe.targets.needs_graph else []
    return TargetsSearch(
        [*graph, *(each.manifest.step for each in tuned)],
        search_of_targets(job.recipe.targets, job.recipe.evaluation),
        (*SEARCH_ENGINES, "num2words"),
        read_lexicon(*job.place, [ALIGNMENT_STEP]).digests,
    )


def transcript_place(job: Job) -> TranscriptPlace:
    """Return where transcripts are aligned, by the recipe's settings."""
    return TranscriptPlace(*job.place, job.recipe.targets.transcripts)


def has_transcripts(job: Job, subset: str) -> bool:
    """Return whether recognizers heard something in a subset's speech."""
    if subset == DEV and not job.has_dev:
        return False
    return bool(job.manifest(features_step(subset)).statistic(WITH_HYPOTHESES, int, 0))


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels names the functions whose servers answer `targets` or `logits`, and their arguments.

    `source` reads what these teachers hear.
    """

    targets: str
    logits: str
    arguments: dict[str, str]
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


def teacher_of(job: Job, labels: Labels, tuned: Sequence[StepResult]) -> Teacher:
    """Return what a task labels by: the servers of the teachers, one a device, and a search.

    An alignment has the settings that were `tuned`, or else the recipe's.
    """
    config = job.recipe.targets
    columns = {"k": str(config.k), "tail_samples": str(config.tail_samples)}
    needs_logits = searches(job) or aligns(job)
    pool = DevicePool(
        factory=labels.logits if needs_logits else labels.targets,
        arguments=labels.arguments if needs_logits else {**columns, **labels.arguments},
        devices=job.cluster.devices,
        batch_frames=config.request_frames,
        idle_timeout_s=SEARCH_IDLE_TIMEOUT_S if needs_logits else IDLE_TIMEOUT_S,
    )
    if not needs_logits:
        return PooledTeacher(pool, config.windows, partial(kept_targets, config), joined)
    score = PooledTeacher(pool, config.windows, kept_logits, np.concatenate)
    if aligns(job):
        place, evaluation = transcript_place(job), job.recipe.evaluation
        for each in tuned:
            place = replace(place, config=tuned_transcripts(place.config, each.manifest))
        own, samples = own_lattices(job), config.tail_samples
        return open_transcript_teacher(place, score, config.k, evaluation, own, samples)
    run, lattices = (job.store, job.run_uri), config.lattices
    settings = search_settings(*run, job.recipe.evaluation, lattices, tuned_model(job))
    return open_lattice_teacher(*run, score, config.k, lattices, settings, config.tail_samples)


STEP = Step(
    name=GENERATE_TARGETS,
    description="Label every frame of the unlabelled features with the teacher's k best logits "
    "(paper 003 IV-B3, V-C), at one offset of each utterance or at all three (targets.offsets). "
    "Several teachers (teacher.ensemble) label with the mean of their posteriors. "
    "With targets.teacher.factory functions of yours label, by the features or the audio, and the "
    "run trains no teacher. Each host starts "
    "one server process for each device that the cluster file names; its tasks share them. With "
    "targets.source = 'lattice' each task also decodes its utterances by the run's graph, and "
    "rescores the lattices by the evaluation's language model, at settings tuned on the "
    "development speakers where the corpus has some, and the lattices' state posteriors "
    "enter the targets. An utterance without a "
    "lattice keeps the teacher's own; loss_budget bounds how many these may be. With "
    "targets.source = 'transcripts' what recognizers heard (ingest --transcripts, or pred_text of "
    "manifests) is aligned by the teacher, and enters the targets where it is no garbage. Of "
    "several rounds (targets.rounds) it makes those whose teachers are trained.",
    run=run,
)

if __name__ == "__main__":
    main(STEP)
