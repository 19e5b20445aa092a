"""Train the bidirectional teacher on labelled data (003 V-A, VII-C4).

torchrun --nproc-per-node 2 -- jobs/train_teacher.py --recipe demo --run runs/demo
"""

from jobs.cli.catalogue import TRAIN_TEACHER
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
    DEV_ALIGNMENT_STEP,
    LABELLED,
    TEACHER,
    UNLABELLED,
    features_step,
)
from training.fit.model_specs import sequence_fit, teacher_fit
from training.fit.train_model import check_trainer, fit_model


def run(job: Job) -> StepResults:
    """Train the teacher on all ranks."""
    fit, device = teacher_fit(job.recipe), own_device(job.arguments.device)
    trained_on = sequence_fit(job.recipe, fit)
    with training_ranks(job.name, device) as group:
        place = job.store, job.run_uri, group, device
        if fit.name not in job.recipe.sequence_training.models:
            return [fit_model(fit, *place)]
        check_trainer(trained_on, group)  # now, not after hours of training
        results = [fit_model(fit, *place), decode_to_lattices(job, fit, group, device)]
        return [*results, fit_model(trained_on, *place)]


STEP = Step(
    name=TRAIN_TEACHER,
    description="Train the bidirectional teacher on the labelled data (paper 003 V-A, VII-C4)."
    " torchrun starts it on several ranks; otherwise it trains on one. It resumes from its last"
    " checkpoint. Where the recipe's sequence_training names the model, it then decodes the"
    " labelled data to lattices and trains the model on by sMBR (VII-C3).",
    reads=(ALIGNMENT_STEP, DEV_ALIGNMENT_STEP, features_step(LABELLED), features_step(UNLABELLED)),
    run=run,
)

if __name__ == "__main__":
    arguments = training_arguments(STEP, TEACHER)
    with on_all_ranks(STEP, arguments):
        main(STEP, arguments)
