"""Evaluate word error rates by device placement (003 VII-D, VIII-C).

megahour evaluate --recipe demo --run runs/demo
"""

import torch

from jobs.cli.catalogue import EVALUATE
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.rank_device import arguments_with_device, own_device, report_device
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    EVALUATED_MODELS,
    HELDOUT,
    evaluated_models,
    features_step,
    model_step,
)
from training.evaluation.evaluate import evaluate


def run(job: Job) -> StepResults:
    """Decode the held-out subset with each model."""
    torch.set_num_threads(1)  # one utterance at a time is too little work to share
    device = own_device(job.arguments.device)
    report_device(job.name, device)
    names = evaluated_models(job.recipe.sequence_training.models)
    return [evaluate(job.store, job.run_uri, job.corpus_uri, job.recipe.evaluation, device, names)]


STEP = Step(
    name=EVALUATE,
    description="Decode the held-out subset with each model and count word errors by device "
    "placement (paper 003 VII-D, Table II). The decoder uses an n-gram language model of the "
    "labelled transcripts.",
    reads=(features_step(HELDOUT), ALIGNMENT_STEP, *map(model_step, EVALUATED_MODELS)),
    run=run,
)

if __name__ == "__main__":
    main(STEP, arguments_with_device(STEP))
