"""Select utterances uniformly and pack them in equal files (003 IV-B1).

megahour select_utterances --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.run_table import SELECT_UTTERANCES
from pipeline.runs.names import UNLABELLED
from pipeline.steps.selection.buckets import (
    NOTHING_INGESTED,
    ingested_metadata,
    require_known_subsets,
    subsets_of,
)
from pipeline.steps.selection.select import metadata_uri, select_utterances


def run(job: Job) -> StepResults:
    """Select each subset; only the unlabelled one is sampled, and a base has the others."""
    require_known_subsets(job.store, job.corpus_uri)
    with distribute_on_spark(job) as distribute:
        ingested = ingested_metadata(job.store, job.run_uri, distribute)
        subsets: tuple[str, ...] = (UNLABELLED,)
        if not job.bases.runs:
            subsets = subsets_of(job.store, job.corpus_uri, ingested)
        return [
            select_utterances(
                job.store,
                job.run_uri,
                subset,
                metadata_uri(job.corpus_uri, subset),
                job.recipe.selection,
                job.recipe.loss_budget,
                distribute,
                ingested.get(subset, NOTHING_INGESTED),
            )
            for subset in subsets
        ]


STEP = Step(
    name=SELECT_UTTERANCES,
    description="Sample the unlabelled hours uniformly from the metadata and pack whole speakers "
    "into nearly equal files (paper 003 IV-B1). The labelled and held-out subsets, and development "
    "speakers where the corpus has some, are selected whole.",
    run=run,
)

if __name__ == "__main__":
    main(STEP)
