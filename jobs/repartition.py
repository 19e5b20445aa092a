"""Repartition features and targets for training (003 IV-B4).

megahour repartition --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job, require_unlabelled
from jobs.cli.spark_steps import distribute_on_spark
from jobs.run_table import REPARTITION
from pipeline.runs.names import targets_rounds
from pipeline.steps.repartition import repartition


def run(job: Job) -> StepResults:
    """Join and repartition the unlabelled subset, for each round whose targets are made."""
    require_unlabelled(job)
    config = job.recipe.partitions
    rounds = targets_rounds(job.recipe.targets.rounds)
    due = [each for each in rounds if each.number == 1 or job.has(each.targets)]
    with distribute_on_spark(job) as distribute:
        return [repartition(job.store, job.run_uri, config, distribute, each) for each in due]


STEP = Step(
    name=REPARTITION,
    description="Join features with targets and write training partitions, each of utterances from "
    "several source shards, without a Spark shuffle (paper 003 IV-B4).",
    run=run,
)

if __name__ == "__main__":
    main(STEP)
