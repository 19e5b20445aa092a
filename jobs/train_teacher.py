"""Train the bidirectional teacher on labelled data (003 V-A, VII-C4).

torchrun --nproc-per-node 2 -- jobs/train_teacher.py --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step
from jobs.cli.training_steps import main, run_fit
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    LABELLED,
    TEACHER,
    UNLABELLED,
    features_step,
    model_step,
)
from training.fit.model_specs import teacher_fit

STEP = Step(
    name="train_teacher",
    description="Train the bidirectional teacher on the labelled data (paper 003 V-A, VII-C4)."
    " torchrun starts it on several ranks; otherwise it trains on one. It resumes from its last"
    " checkpoint.",
    reads=(ALIGNMENT_STEP, features_step(LABELLED), features_step(UNLABELLED)),
    writes=(model_step(TEACHER),),
    run=run_fit(teacher_fit),
)

if __name__ == "__main__":
    main(STEP, section=TEACHER)
