"""Train the supervised baseline on labelled data (003 VII-C7).

torchrun --nproc-per-node 2 -- jobs/train_baseline.py --recipe demo --run runs/demo
"""

from jobs.cli.catalogue import TRAIN_BASELINE
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.rank_device import own_device
from jobs.cli.training_steps import (
    decode_to_lattices,
    on_all_ranks,
    training_arguments,
    training_ranks,
)
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    DEV_ALIGNMENT_STEP,
    LABELLED,
    UNLABELLED,
    features_step,
)
from training.fit.model_specs import baseline_fit, sequence_fit
from training.fit.train_model import check_trainer, fit_model


def run(job: Job) -> StepResults:
    """Train the baseline on all ranks."""
    fit, device = baseline_fit(job.recipe), own_device(job.arguments.device)
    trained_on = sequence_fit(job.recipe, fit)
    with training_ranks(job.name, device) as group:
        place = job.store, job.run_uri, group, device
        if fit.name not in job.recipe.sequence_training.models:
            return [fit_model(fit, *place)]
        check_trainer(trained_on, group)  # now, not after hours of training
        results = [fit_model(fit, *place), decode_to_lattices(job, fit, group, device)]
        return [*results, fit_model(trained_on, *place)]


STEP = Step(
    name=TRAIN_BASELINE,
    description="Train the supervised baseline, a model of the student's form, on labelled data"
    " (paper 003 VII-C7)."
    " torchrun starts it on several ranks; otherwise it trains on one. It resumes from its last"
    " checkpoint. Where the recipe's sequence_training names the model, it then decodes the"
    " labelled data to lattices and trains the model on by sMBR (VII-C3).",
    reads=(ALIGNMENT_STEP, DEV_ALIGNMENT_STEP, features_step(LABELLED), features_step(UNLABELLED)),
    run=run,
)

if __name__ == "__main__":
    arguments = training_arguments(STEP, BASELINE)
    with on_all_ranks(STEP, arguments):
        main(STEP, arguments)
