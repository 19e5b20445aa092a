"""Evaluate word error rates by device placement (003 VII-D, VIII-C).

megahour evaluate --recipe demo --run runs/demo
"""

from collections.abc import Sequence

import torch

from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.cli.training_steps import arguments_with_device, own_device, report_device
from jobs.run_table import EVALUATE
from pipeline.runs.names import ALIGNMENT_STEP, STUDENT, targets_rounds
from pipeline.steps.audio_source import AudioSource
from pipeline.steps.targets import FEATURES
from training.align.labelled import read_tree
from training.distributed.process_group import CPU
from training.evaluate.heldout import evaluate
from training.evaluate.slices import ModelsToDecode
from training.evaluate.tuning import tune
from training.settings.decoding import OwnTeacherConfig
from training.targets.kbest_costs import CostedTeachers, measure_kbest_costs, trained_teachers
from training.targets.own_teacher import OwnMember, check_untrained, load_own_members


def run(job: Job) -> StepResults:
    """Tune on development speakers where there are some; decode the held-out subset."""
    device = own_device(job.arguments.device)
    # A cluster's hosts need not have this one's GPU, and tasks beside each other would share it.
    of_tasks = device if job.cluster.has_one_slot else CPU
    report_device(job.name, of_tasks)
    where, recipe = job.place, job.recipe
    with distribute_on_spark(job) as distribute:
        forms = {name: recipe.models.of(name) for name in job.evaluated_models}
        models = ModelsToDecode(forms, distribute, str(of_tasks))
        tuned = [tune(*where, recipe.evaluation, recipe.tuning, models)] if job.has_dev else []
        made = [*tuned, evaluate(*where, recipe.evaluation, models)]
    if not job.has_unlabelled:
        return made
    place = *where[:2], recipe.targets
    return [*made, measure_kbest_costs(*place, labelling(job), recipe.models.of(STUDENT), device)]


def labelling(job: Job) -> CostedTeachers:
    """Return the models that labelled the last targets, or the user's own teachers."""
    recipe, own = job.recipe, job.recipe.targets.teacher
    if models := recipe.labelling_models(targets_rounds(recipe.targets.rounds)[-1]):
        forms = {name: recipe.models.of(name) for name in models}
        return trained_teachers(job.store, job.run_uri, forms)
    assert isinstance(own, OwnTeacherConfig), "else models label"
    audio = AudioSource(job.store, job.corpus_uri, recipe.features.conversion)

    def load(device: torch.device) -> Sequence[OwnMember]:
        num_senones = read_tree(job.store, job.run_uri).num_senones
        return load_own_members(own, device, num_senones)[1]

    source = audio if check_untrained(own) == "audio" else FEATURES
    return CostedTeachers(load, (ALIGNMENT_STEP,), source, own)


STEP = Step(
    name=EVALUATE,
    description="Decode the held-out subset with each model and count word errors by device "
    "placement (paper 003 VII-D, Table II), with intervals over speakers. Each utterance is "
    "decoded to a lattice by the run's graph, which the n-gram model of the recipe's order "
    "rescores; a word's confidence is its posterior there. Where the corpus has "
    "development speakers, each model's scales, n-gram order and insertion penalty are tuned "
    "on these before. A Spark task decodes some ten minutes with one model, on --device where the "
    "cluster's master is local[1], on the CPU elsewhere. Hypotheses and references are kept as "
    "trn, ctm and stm files, which sclite reads. A sample of the unlabelled features "
    "then says what the targets' k costs. Without unlabelled features baseline and teacher alone "
    "are scored.",
    run=run,
)

if __name__ == "__main__":
    main(STEP, arguments_with_device(STEP))
