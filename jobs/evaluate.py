"""Evaluate word error rates by device placement (003 VII-D, VIII-C).

megahour evaluate --recipe demo --run runs/demo
"""

from jobs.cli.catalogue import EVALUATE
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.rank_device import arguments_with_device, own_device, report_device
from jobs.cli.spark_steps import distribute_on_spark
from pipeline.runs.manifest import subsets_of_run
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    EVALUATED_MODELS,
    HELDOUT,
    TUNING_STEP,
    evaluated_models,
    features_step,
    model_step,
)
from training.distributed.process_group import CPU
from training.evaluation.evaluate import evaluate
from training.evaluation.slices import ModelsToDecode
from training.evaluation.tuning import tune


def run(job: Job) -> StepResults:
    """Tune on development speakers where there are some; decode the held-out subset."""
    device = own_device(job.arguments.device)
    # A cluster's hosts need not have this one's GPU, and tasks beside each other would share it.
    of_tasks = device if job.cluster.has_one_slot else CPU
    report_device(job.name, of_tasks)
    where, recipe = (job.store, job.run_uri, job.corpus_uri), job.recipe
    names = evaluated_models(
        recipe.sequence_training.models, recipe.teacher.ensemble, recipe.targets.rounds
    )
    has_development = DEV in subsets_of_run(job.store, job.run_uri, features_step)
    with distribute_on_spark(job) as distribute:
        forms = {name: recipe.models.of(name) for name in names}
        models = ModelsToDecode(forms, distribute, str(of_tasks))
        tuned = [tune(*where, recipe.evaluation, recipe.tuning, models)] if has_development else []
        return [*tuned, evaluate(*where, recipe.evaluation, models)]


STEP = Step(
    name=EVALUATE,
    description="Decode the held-out subset with each model and count word errors by device "
    "placement (paper 003 VII-D, Table II), with intervals over speakers. The decoder uses an "
    "n-gram language model of the labelled transcripts, or what the recipe names. Where the corpus "
    "has development speakers, each model's scales, n-gram order and insertion penalty are tuned "
    "on these before. A Spark task decodes some ten minutes with one model, on --device where the "
    "cluster's master is local[1], on the CPU elsewhere. Hypotheses and references are kept as "
    "trn, ctm and stm files, which sclite reads.",
    reads=(
        features_step(HELDOUT),
        TUNING_STEP,
        ALIGNMENT_STEP,
        *map(model_step, EVALUATED_MODELS),
    ),
    run=run,
)

if __name__ == "__main__":
    main(STEP, arguments_with_device(STEP))
