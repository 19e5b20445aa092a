"""Extract normalized log-mel features from audio (003 IV-B2).

megahour extract_features --recipe demo --run runs/demo
"""

from jobs.cli.catalogue import EXTRACT_FEATURES
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from pipeline.runs.manifest import subsets_of_run
from pipeline.runs.names import ALL_SUBSETS, selection_step
from pipeline.steps.features import extract_features


def run(job: Job) -> StepResults:
    """Extract the features of each subset."""
    with distribute_on_spark(job) as distribute:
        return [
            extract_features(
                job.store,
                job.run_uri,
                subset,
                job.corpus_uri,
                job.recipe.features,
                job.recipe.loss_budget,
                distribute,
            )
            for subset in subsets_of_run(job.store, job.run_uri, selection_step)
        ]


STEP = Step(
    name=EXTRACT_FEATURES,
    description="Fetch and decode audio, compute 64 log-mel energies, subtract each speaker's "
    "causal mean, shuffle and store feature shards with their moments (paper 003 IV-B2). "
    "The quarantine ledger lists the audio that cannot be used.",
    reads=tuple(selection_step(subset) for subset in ALL_SUBSETS),
    run=run,
)

if __name__ == "__main__":
    main(STEP)
