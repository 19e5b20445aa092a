"""Train the supervised baseline on labelled data (003 VII-C7).

torchrun --nproc-per-node 2 --module -- jobs.train_baseline --recipe demo --run runs/demo
"""

from jobs.cli.training_steps import main_on_all_ranks, training_step
from jobs.run_table import TRAIN_BASELINE
from training.fit.model_specs import baseline_fit

STEP = training_step(
    TRAIN_BASELINE,
    "Train the supervised baseline, a model of the student's form, on labelled data (paper 003 "
    "VII-C7).",
    lambda job: [baseline_fit(job.recipe)],
)

if __name__ == "__main__":
    main_on_all_ranks(STEP)
