"""Ingest a Kaldi data directory as audio objects and metadata.

megahour ingest --recipe recorded --run runs/mine --kaldi-dir /data/mine
"""

from dataclasses import asdict
from pathlib import Path

from infra.store.object_store import join_uri
from jobs.cli.catalogue import INGEST
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.ingestion.corpus import ingest
from pipeline.records import Tally, parse_utterance
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import Output, sha256
from pipeline.runs.names import INGEST_STEP, METADATA_FOLDER
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

    def write_corpus(_: StepContext) -> StepContents:
        summary = ingest(directory, job.store, job.corpus_uri)
        outputs = metadata_outputs(job)
        tally = sum((output.tally for output in outputs), Tally())
        return StepContents.of_all(tally, outputs, asdict(summary) | {"new_objects": None})

    spec = StepSpec(job.store, job.run_uri, INGEST_STEP, {}, digests=digests)
    return [run_step(spec, write_corpus)]


def metadata_outputs(job: Job) -> tuple[Output, ...]:
    """Return the metadata objects of the corpus, by their keys below it."""
    outputs = []
    for found in job.store.list(join_uri(job.corpus_uri, METADATA_FOLDER)):
        data = job.store.get(found.uri)
        tally = Tally.of(parse_utterance(line) for line in data.decode().splitlines())
        key = found.uri.removeprefix(job.corpus_uri).lstrip("/")
        outputs.append(Output(key, len(data), sha256(data), tally.utterances, tally.duration_ms))
    return tuple(outputs)


STEP = Step(
    name=INGEST,
    description="Copy a Kaldi data directory into the store as a corpus of audio objects and "
    "metadata. Required are wav.scp, text, utt2spk, lexicon.txt, labelled.speakers, "
    "unlabelled.speakers and heldout.speakers; optional are utt2placement, utt2time, utt2dur and "
    "spk2locale.",
    reads=(),
    writes=(INGEST_STEP,),
    run=run,
)

if __name__ == "__main__":
    parser = STEP.parser()
    parser.add_argument("--kaldi-dir", required=True, help="the Kaldi data directory to copy")
    main(STEP, parser.parse_args())
