"""Train the bidirectional teacher on labelled data (003 V-A, VII-C4).

torchrun --nproc-per-node 2 -- jobs/train_teacher.py --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.training_steps import (
    HOW_MODELS_TRAIN,
    on_all_ranks,
    training_arguments,
    training_ranks,
    training_stages,
)
from jobs.run_table import TRAIN_TEACHER
from pipeline.runs.manifest import is_finished
from pipeline.runs.names import TEACHER
from training.fit.model_specs import sibling_fits, teacher_fits


def run(job: Job) -> StepResults:
    """Train the teachers on all ranks, and those of later rounds whose targets are made."""
    place = job.store, job.run_uri
    siblings = sibling_fits(job.recipe)
    due = [fit for fit in siblings if fit.unlabelled and is_finished(*place, fit.unlabelled)]
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
    " targets before and labelled data in turn, once repartition has made them." + HOW_MODELS_TRAIN,
    run=run,
)

if __name__ == "__main__":
    arguments = training_arguments(STEP, TEACHER)
    with on_all_ranks(STEP, arguments):
        main(STEP, arguments)
