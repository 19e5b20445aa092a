"""Train the network that realigns (003 VII-C2).

torchrun --nproc-per-node 2 --module -- jobs.train_aligner --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults
from jobs.cli.job import Job
from jobs.cli.training_steps import (
    HOW_MODELS_TRAIN,
    main_on_all_ranks,
    training_ranks,
    training_stages,
)
from jobs.run_table import TRAIN_ALIGNER
from pipeline.runs.names import ALIGNER, realignment_rounds
from training.fit.model_specs import aligner_fit


def run(job: Job) -> StepResults:
    """Train the first round's aligner on all ranks, and those of later rounds that are due."""
    rounds = realignment_rounds(job.recipe.alignment.rounds)
    due = [each for each in rounds if each.number == 1 or job.has(each.reads)]
    with training_ranks(job) as ranks:
        return [
            train()
            for each in due
            for train in training_stages(job, aligner_fit(job.recipe, each), ranks)
        ]


STEP = Step(
    name=TRAIN_ALIGNER,
    description="Train a network of the student's form on the bootstrap alignment; realign then "
    "aligns the labelled data by it (paper 003 VII-C2). With several rounds (alignment.rounds) it "
    "trains the next one's network, on the alignment before, once realign has made that."
    + HOW_MODELS_TRAIN,
    run=run,
)

if __name__ == "__main__":
    main_on_all_ranks(STEP, ALIGNER)
