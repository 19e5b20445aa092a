"""Train the network that realigns (003 VII-C2).

torchrun --nproc-per-node 2 --module -- jobs.train_aligner --recipe demo --run runs/demo
"""

from jobs.cli.job import Job
from jobs.cli.training_steps import main_on_all_ranks, training_step
from jobs.run_table import TRAIN_ALIGNER
from pipeline.runs.names import realignment_rounds
from training.fit.model_specs import Fit, aligner_fit


def due_fits(job: Job) -> list[Fit]:
    """Return the first round's aligner, and those of later rounds that are due."""
    rounds = realignment_rounds(job.recipe.alignment.rounds)
    due = [each for each in rounds if each.number == 1 or job.has(each.reads)]
    return [aligner_fit(job.recipe, each) for each in due]


STEP = training_step(
    TRAIN_ALIGNER,
    "Train a network of the student's form on the bootstrap alignment; realign then aligns the "
    "labelled data by it (paper 003 VII-C2). With several rounds (alignment.rounds) it trains the "
    "next one's network, on the alignment before, once realign has made that.",
    due_fits,
)

if __name__ == "__main__":
    main_on_all_ranks(STEP)
