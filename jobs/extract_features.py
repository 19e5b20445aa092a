"""Extract normalized log-mel features from audio (003 IV-B2).

megahour extract_features --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.run_table import EXTRACT_FEATURES
from pipeline.filterbank import NUM_BINS
from pipeline.runs.names import ALL_SUBSETS, selection_step
from pipeline.steps.features import extract_features
from pipeline.steps.selection.buckets import subsets_of


def run(job: Job) -> StepResults:
    """Extract the features of each subset."""
    of_corpus = () if job.bases.runs else subsets_of(job.store, job.corpus_uri)
    # What was selected is extracted, also where its metadata is gone.
    subsets = [
        subset for subset in ALL_SUBSETS if subset in of_corpus or job.has(selection_step(subset))
    ]
    results = []
    with distribute_on_spark(job) as distribute:
        for subset in subsets:
            result = extract_features(
                job.store,
                job.run_uri,
                subset,
                job.corpus_uri,
                job.recipe.features,
                job.recipe.loss_budget,
                distribute,
            )
            results.append(result)
    return results


STEP = Step(
    name=EXTRACT_FEATURES,
    description=f"Fetch and decode audio, compute {NUM_BINS} log-mel energies, subtract each "
    "speaker's causal mean, shuffle and store feature shards with their moments (paper 003 IV-B2). "
    "The quarantine ledger lists the audio that cannot be used.",
    run=run,
)

if __name__ == "__main__":
    main(STEP)
