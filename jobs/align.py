"""Align the labelled data: bootstrap, senone tree, a network, realignment (003 VII-C2).

python -m jobs.align --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Job, Result, Step, main
from jobs.cli.training_steps import run_fit
from training.distributed import process_group
from training.fit.model_specs import aligner_fit
from training.targets.alignment import bootstrap, realign


def run(job: Job) -> Result:
    """Bootstrap, train the network on that, and align again by it."""
    recipe = job.recipe
    where = job.store, job.run_uri, job.corpus_uri
    bootstrap(*where, recipe.bootstrap, recipe.senones, recipe.loss_budget)
    with process_group.open_world():
        run_fit(aligner_fit)(job)
    return [realign(*where, recipe.evaluation.acoustic_scale, recipe.loss_budget)]


STEP = Step(
    name="align",
    description="Give the labelled data its frame-level targets: a monophone bootstrap, a phonetic "
    "decision tree of senones, a network trained on those, and a realignment by the network "
    "(paper 003 VII-C2).",
    reads=("features/labelled", "features/unlabelled"),
    writes=("alignments/bootstrap", "models/aligner", "alignments/labelled"),
    run=run,
)

if __name__ == "__main__":
    main(STEP)
