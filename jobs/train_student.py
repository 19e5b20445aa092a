"""Train the student on targets and labelled data in turn (003 V-D).

torchrun --nproc-per-node 4 -- jobs/train_student.py --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step
from jobs.cli.training_steps import main, run_fit
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    LABELLED,
    PARTITIONS_STEP,
    STUDENT,
    UNLABELLED,
    features_step,
    model_step,
)
from training.fit.model_specs import student_fit

STEP = Step(
    name="train_student",
    description="Train the student on the teacher's targets, interleaving labelled data"
    " (scheduled learning, paper 003 V-D)."
    " torchrun starts it on several ranks; otherwise it trains on one. It resumes from its last"
    " checkpoint.",
    reads=(
        ALIGNMENT_STEP,
        PARTITIONS_STEP,
        features_step(LABELLED),
        features_step(UNLABELLED),
    ),
    writes=(model_step(STUDENT),),
    run=run_fit(student_fit),
)

if __name__ == "__main__":
    main(STEP, section=STUDENT)
