"""Align the labelled data again, by a trained network (003 VII-C2).

megahour realign --recipe demo --run runs/demo
"""

from dataclasses import replace
from functools import partial

from jobs.bootstrap import check_tree
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.cli.training_steps import arguments_with_device, own_device
from jobs.run_table import REALIGN
from pipeline.runs.names import ALIGNER, DEV, model_step, realignment_rounds
from training.align.realignment import AlignmentSettings, realign


def run(job: Job) -> StepResults:
    """Realign by the first round's network, and by those of later rounds that are trained.

    The last round's network also aligns the development speakers, on whom newbob measures losses.
    """
    recipe, device = job.recipe, own_device(job.arguments.device)
    settings = AlignmentSettings(
        recipe.evaluation.acoustic_scale,
        recipe.models.of(ALIGNER),
        # A cluster's hosts may lack this one's GPU, and tasks beside each other would share it.
        str(device) if job.cluster.has_one_slot else "cpu",
        recipe.alignment.versions,
    )
    has_dev = job.has_dev
    aligned = []
    with distribute_on_spark(job) as distribute:
        realigned = partial(
            realign,
            *job.place,
            settings=settings,
            loss_budget=recipe.loss_budget,
            distribute=distribute,
        )
        for each in realignment_rounds(recipe.alignment.rounds):
            if each.number > 1 and not job.has(model_step(each.aligner)):
                break
            if each.number < each.total:
                aligned.append(realigned(each))
                continue
            last = settings
            if recipe.alignment.regrow_tree:
                last = replace(settings, regrown=recipe.senones)
            aligned.append(realigned(each, settings=last))
            if last.regrown is not None:
                check_tree(recipe, aligned[-1].manifest)
            if has_dev:
                aligned.append(realigned(each, settings=last, subset=DEV))
    return aligned


STEP = Step(
    name=REALIGN,
    description="Align every labelled frame to a senone, by the network that train_aligner has "
    "trained (paper 003 VII-C2): a Spark task for each shard, on --device where the cluster's "
    "master is local[1], on the CPU elsewhere. Of several rounds (alignment.rounds) it does those "
    "whose network is trained; the last one also aligns the development speakers. With "
    "alignment.regrow_tree the last one grows the tree again, on its own alignments.",
    run=run,
)

if __name__ == "__main__":
    main(STEP, arguments_with_device(STEP))
