"""Evaluate word error rates by device placement (003 VII-D, VIII-C).

megahour evaluate --recipe demo --run runs/demo
"""

import torch

from jobs.cli.catalogue import EVALUATE
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.rank_device import arguments_with_device, own_device, report_device
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
from training.evaluation.evaluate import evaluate
from training.evaluation.tuning import tune


def run(job: Job) -> StepResults:
    """Tune on development speakers where there are some; decode the held-out subset."""
    torch.set_num_threads(1)  # one utterance at a time is too little work to share
    device = own_device(job.arguments.device)
    report_device(job.name, device)
    where, recipe = (job.store, job.run_uri, job.corpus_uri), job.recipe
    names = evaluated_models(recipe.sequence_training.models, recipe.teacher.ensemble)
    shared = {name: recipe.models.of(name) for name in names}, device
    has_development = DEV in subsets_of_run(job.store, job.run_uri, features_step)
    tuned = [tune(*where, recipe.evaluation, recipe.tuning, *shared)] if has_development else []
    return [*tuned, evaluate(*where, recipe.evaluation, *shared)]


STEP = Step(
    name=EVALUATE,
    description="Decode the held-out subset with each model and count word errors by device "
    "placement (paper 003 VII-D, Table II). The decoder uses an n-gram language model of the "
    "labelled transcripts, or what the recipe names. Where the corpus has development speakers, "
    "each model's scales, n-gram order and insertion penalty are tuned on these before.",
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
