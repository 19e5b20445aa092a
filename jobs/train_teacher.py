"""Train the bidirectional teacher on labelled data (003 V-A, VII-C4).

torchrun --nproc-per-node 2 --module -- jobs.train_teacher --recipe demo --run runs/demo
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
from jobs.run_table import TRAIN_TEACHER
from pipeline.runs.names import TEACHER
from training.fit.model_specs import sibling_fits, teacher_fits


def run(job: Job) -> StepResults:
    """Train the teachers on all ranks, and those of later rounds whose targets are made."""
    due = [fit for fit in sibling_fits(job.recipe) if fit.unlabelled and job.has(fit.unlabelled)]
    with training_ranks(job) as ranks:
        return [
            train()
            for fit in (*teacher_fits(job.recipe), *due)
            for train in training_stages(job, fit, ranks)
        ]


STEP = Step(
    name=TRAIN_TEACHER,
    description="Train the bidirectional teacher on the labelled data (paper 003 V-A, VII-C4). With"
    " several rounds of targets (targets.rounds) it then trains the next one's teacher, on the"
    " targets before and labelled data in turn, once repartition has made them."
    + HOW_MODELS_TRAIN
    + HOW_SEQUENCES_TRAIN,
    run=run,
)

if __name__ == "__main__":
    main_on_all_ranks(STEP, TEACHER)
