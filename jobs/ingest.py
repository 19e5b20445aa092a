"""Ingest a Kaldi data directory as audio objects and metadata.

megahour ingest --recipe recorded --run runs/mine --kaldi-dir /data/mine
"""

from collections.abc import Sequence
from pathlib import Path

from jobs.cli.catalogue import INGEST
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.ingestion.corpus import ingest
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import StepContext
from pipeline.runs.ledger import check_loss_budget
from pipeline.runs.manifest import Output, sha256
from pipeline.runs.names import INGEST_STEP
from pipeline.runs.step import StepContents, StepSpec, run_step


def run(job: Job) -> StepResults:
    """Copy audio and write metadata and lexicon, unless this directory was ingested before."""
    directory = Path(job.arguments.kaldi_dir)
    if not directory.is_dir():
        raise ValueError(f"--kaldi-dir {directory} is not a directory: correct the path")
    digests = {
        path.name: sha256(path.read_bytes())
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix != ".ctm"
    }
    spec = StepSpec(job.store, job.run_uri, INGEST_STEP, {}, digests=digests)
    return [run_step(spec, lambda context: _write_corpus(job, context, directory))]


def _write_corpus(job: Job, context: StepContext, directory: Path) -> StepContents:
    ledgers: list[Output] = []

    def judge(rows: Sequence[Quarantined], tally_in: Tally) -> None:
        if ledger := context.put_ledger(INGEST_STEP, rows):
            ledgers.append(ledger)
        budget, quarantined = job.recipe.loss_budget, Tally.of(rows)
        check_loss_budget(job.store, job.run_uri, ledgers, quarantined, tally_in, budget)

    corpus = ingest(directory, job.store, job.corpus_uri, judge)
    tally, quarantined = (
        sum((output.tally for output in outputs), Tally()) for outputs in (corpus.outputs, ledgers)
    )
    return StepContents(
        outputs=corpus.outputs,
        tally_in=tally + quarantined,
        tally_out=tally,
        ledgers=tuple(ledgers),
        quarantined=quarantined,
        statistics={
            "utterances": corpus.utterances,
            "hours": corpus.hours,
            "unreadable": corpus.unreadable,
            "unlisted": corpus.unlisted,
        },
    )


STEP = Step(
    name=INGEST,
    description="Copy a Kaldi data directory into the store as a corpus of audio objects and "
    "metadata. Required are wav.scp, text, utt2spk, lexicon.txt, labelled.speakers, "
    "unlabelled.speakers and heldout.speakers; optional are utt2placement, utt2time, utt2dur and "
    "spk2locale. Utterances without a usable record or file become ledger rows.",
    reads=(),
    run=run,
)

if __name__ == "__main__":
    parser = STEP.parser()
    parser.add_argument("--kaldi-dir", required=True, help="the Kaldi data directory to copy")
    main(STEP, parser.parse_args())
