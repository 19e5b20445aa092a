"""Align the labelled data to senones (003 VII-C2).

megahour align --recipe demo --run runs/demo
"""

from jobs.cli.catalogue import ALIGN
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.training_steps import training_ranks
from pipeline.runs.names import (
    LABELLED,
    UNLABELLED,
    features_step,
)
from training.distributed import process_group
from training.fit.model_specs import aligner_fit
from training.fit.train_model import fit_model
from training.targets.alignment import bootstrap, realign


def run(job: Job) -> StepResults:
    """Bootstrap an alignment, train a network on it, and realign with the network."""
    recipe = job.recipe
    where = job.store, job.run_uri, job.corpus_uri
    bootstrap(*where, recipe.bootstrap, recipe.senones, recipe.loss_budget)
    with process_group.open_world(), training_ranks() as group:
        fit_model(aligner_fit(recipe), job.store, job.run_uri, group)
    return [realign(*where, recipe.evaluation.acoustic_scale, recipe.loss_budget)]


STEP = Step(
    name=ALIGN,
    description="Align every labelled frame to a senone. A monophone model makes the first "
    "alignment, a phonetic decision tree ties its states to senones, and a network trained on "
    "these realigns the data (paper 003 VII-C2).",
    reads=(features_step(LABELLED), features_step(UNLABELLED)),
    run=run,
)

if __name__ == "__main__":
    main(STEP)
