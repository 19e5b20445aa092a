"""Train the supervised baseline on labelled data (003 VII-C7).

torchrun --nproc-per-node 2 --module -- jobs.train_baseline --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults
from jobs.cli.job import Job
from jobs.cli.training_steps import (
    HOW_MODELS_TRAIN,
    HOW_SEQUENCES_TRAIN,
    main_on_all_ranks,
    training_ranks,
    training_stages,
)
from jobs.run_table import TRAIN_BASELINE
from pipeline.runs.names import BASELINE
from training.fit.model_specs import baseline_fit


def run(job: Job) -> StepResults:
    """Train the baseline on all ranks."""
    with training_ranks(job) as ranks:
        return [train() for train in training_stages(job, baseline_fit(job.recipe), ranks)]


STEP = Step(
    name=TRAIN_BASELINE,
    description="Train the supervised baseline, a model of the student's form, on labelled data"
    " (paper 003 VII-C7)." + HOW_MODELS_TRAIN + HOW_SEQUENCES_TRAIN,
    run=run,
)

if __name__ == "__main__":
    main_on_all_ranks(STEP, BASELINE)
