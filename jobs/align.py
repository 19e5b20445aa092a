"""Align the labelled data to senones (003 VII-C2).

megahour align --recipe demo --run runs/demo
"""

from jobs.cli.catalogue import ALIGN
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.rank_device import arguments_with_device, own_device
from jobs.cli.training_steps import training_ranks
from pipeline.runs.names import (
    ALIGNER,
    LABELLED,
    UNLABELLED,
    features_step,
)
from training.distributed import process_group
from training.fit.model_specs import aligner_fit
from training.fit.train_model import fit_model
from training.recipes import check_phones, check_ranks, check_senones
from training.targets.alignment import bootstrap, read_tree, realign
from training.targets.labelled import read_lexicon


def run(job: Job) -> StepResults:
    """Bootstrap an alignment, train a network on it, and realign with the network."""
    recipe = job.recipe
    where = job.store, job.run_uri, job.corpus_uri
    device = own_device(job.arguments.device)
    # Now, not after the hours of the bootstrap.
    check_ranks(recipe, ALIGNER, 1)
    lexicon = read_lexicon(*where, [features_step(LABELLED)]).parse()
    check_phones(recipe, len(lexicon.phones))
    bootstrap(*where, recipe.bootstrap, recipe.senones, recipe.loss_budget)
    check_senones(recipe, read_tree(job.store, job.run_uri).num_senones)
    with process_group.open_world(device=device), training_ranks(job.name, device) as group:
        fit_model(aligner_fit(recipe), job.store, job.run_uri, group, device)
    return [realign(*where, recipe.evaluation.acoustic_scale, recipe.loss_budget, device)]


STEP = Step(
    name=ALIGN,
    description="Align every labelled frame to a senone. A monophone model makes the first "
    "alignment, a phonetic decision tree ties its states to senones, and a network trained on "
    "these realigns the data (paper 003 VII-C2).",
    reads=(features_step(LABELLED), features_step(UNLABELLED)),
    run=run,
)

if __name__ == "__main__":
    main(STEP, arguments_with_device(STEP))
