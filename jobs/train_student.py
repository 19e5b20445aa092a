"""Train the student on targets and labelled data in turn (003 V-D).

torchrun --nproc-per-node 4 --module -- jobs.train_student --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults
from jobs.cli.job import Job, require_unlabelled
from jobs.cli.training_steps import (
    HOW_MODELS_TRAIN,
    HOW_SEQUENCES_TRAIN,
    main_on_all_ranks,
    training_ranks,
    training_stages,
)
from jobs.run_table import TRAIN_STUDENT
from pipeline.runs.names import STUDENT
from training.fit.model_specs import student_fit


def run(job: Job) -> StepResults:
    """Train the student on all ranks."""
    require_unlabelled(job)
    with training_ranks(job) as ranks:
        return [train() for train in training_stages(job, student_fit(job.recipe), ranks)]


STEP = Step(
    name=TRAIN_STUDENT,
    description="Train the student on the teacher's targets, interleaving labelled data"
    " (scheduled learning, paper 003 V-D)." + HOW_MODELS_TRAIN + HOW_SEQUENCES_TRAIN,
    run=run,
)

if __name__ == "__main__":
    main_on_all_ranks(STEP, STUDENT)
