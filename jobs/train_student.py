"""Train the student on targets and labelled data in turn (003 V-D).

torchrun --nproc-per-node 4 --module -- jobs.train_student --recipe demo --run runs/demo
"""

from jobs.cli.job import Job, require_unlabelled
from jobs.cli.training_steps import main_on_all_ranks, training_step
from jobs.run_table import TRAIN_STUDENT
from training.fit.model_specs import Fit, student_fit


def due_fits(job: Job) -> list[Fit]:
    """Return the student; ConfigurationError in a run without unlabelled speech."""
    require_unlabelled(job)
    return [student_fit(job.recipe)]


STEP = training_step(
    TRAIN_STUDENT,
    "Train the student on the teacher's targets, interleaving labelled data (scheduled learning, "
    "paper 003 V-D).",
    due_fits,
)

if __name__ == "__main__":
    main_on_all_ranks(STEP)
