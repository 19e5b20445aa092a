"""Train the supervised baseline on labelled data (003 VII-C7).

torchrun --nproc-per-node 2 -- jobs/train_baseline.py --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step
from jobs.cli.training_steps import main, run_fit
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    LABELLED,
    UNLABELLED,
    features_step,
    model_step,
)
from training.fit.model_specs import baseline_fit

STEP = Step(
    name="train_baseline",
    description="Train the supervised baseline, a model of the student's form, on labelled data"
    " (paper 003 VII-C7)."
    " torchrun starts it on several ranks; otherwise it trains on one. It resumes from its last"
    " checkpoint.",
    reads=(ALIGNMENT_STEP, features_step(LABELLED), features_step(UNLABELLED)),
    writes=(model_step(BASELINE),),
    run=run_fit(baseline_fit),
)

if __name__ == "__main__":
    main(STEP, section=BASELINE)
