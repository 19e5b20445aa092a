"""Train the bidirectional teacher on labelled data (003 V-A, VII-C4).

torchrun --nproc-per-node 2 --module -- jobs.train_teacher --recipe demo --run runs/demo
"""

from jobs.cli.job import Job
from jobs.cli.training_steps import main_on_all_ranks, training_step
from jobs.run_table import TRAIN_TEACHER
from training.fit.model_specs import Fit, sibling_fits, teacher_fits


def due_fits(job: Job) -> list[Fit]:
    """Return the teachers, and those of later rounds whose targets are made."""
    due = [fit for fit in sibling_fits(job.recipe) if fit.unlabelled and job.has(fit.unlabelled)]
    return [*teacher_fits(job.recipe), *due]


STEP = training_step(
    TRAIN_TEACHER,
    "Train the bidirectional teacher on the labelled data (paper 003 V-A, VII-C4). With several "
    "rounds of targets (targets.rounds) it then trains the next one's teacher, on the targets "
    "before and labelled data in turn, once repartition has made them.",
    due_fits,
)

if __name__ == "__main__":
    main_on_all_ranks(STEP)
