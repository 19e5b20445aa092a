"""Read the reports of other runs, and compare a run with one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from infra.store.object_store import (
    ObjectNotFound,
    ObjectStore,
    join_uri,
    normalize_uri,
    read_checked,
)
from jobs.cli.job import Job
from jobs.report_contents.compared_run import compared
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output, sha256
from pipeline.runs.names import EVALUATION_ERRORS, EVALUATION_STEP, REPORT_DOCUMENT
from pipeline.runs.sealed_json import unseal
from training.evaluate.word_errors import UtteranceErrors, read_errors


def other_uris(job: Job) -> list[str]:
    """Return the other runs that the command line names, each once."""
    named = (job.arguments.compare, job.arguments.oracle)
    return list(dict.fromkeys((*job.arguments.curve, *filter(None, named))))


@dataclass(frozen=True, slots=True)
class OtherReport:
    """OtherReport is the report of another run, with its digest, and the store to read the run."""

    store: ObjectStore
    run_uri: str
    document: Mapping[str, Any]
    sha256: str

    @property
    def uri(self) -> str:
        """Return the URI of the report."""
        return join_uri(self.run_uri, REPORT_DOCUMENT)

    @classmethod
    def read(cls, job: Job, given: str) -> "OtherReport":
        """Read the report of the run at `given`; an error says how to make it."""
        run_uri = normalize_uri(given)
        store = ObjectStore(job.cluster.readable(run_uri, run_uri))
        remedy = f"run megahour report --run {given} again"
        uri = join_uri(run_uri, REPORT_DOCUMENT)
        try:
            document, digest = read_checked(
                store, uri, lambda data: (unseal(data, remedy), sha256(data))
            )
        except ObjectNotFound as error:
            first = f"run megahour report --run {given} first"
            raise ValueError(f"{uri} is missing: {first}") from error
        return cls(store, run_uri, document, digest)


def comparison(job: Job, other: OtherReport) -> dict[str, Any]:
    """Compare this run with another one, on the utterances that both were evaluated on."""
    return compared(
        other.document,
        partial(utterance_errors, job.store, job.run_uri),
        partial(utterance_errors, other.store, other.run_uri),
    )


def utterance_errors(store: ObjectStore, run_uri: str) -> list[UtteranceErrors]:
    """Read the word errors by utterance that a run's evaluation wrote."""
    evaluation = read_manifest(store, run_uri, EVALUATION_STEP)
    return read_errors(read_output(store, run_uri, output_of(evaluation, EVALUATION_ERRORS)))


def output_of(evaluation: Manifest, name: str, suffix: str = "") -> Output:
    """Return the evaluation's output of this name; ValueError if an earlier version wrote none."""
    for output in evaluation.outputs:
        file = output.key.rpartition("/")[2]
        if file.startswith(f"{name}-") and file.endswith(suffix):
            return output
    raise ValueError(f"{EVALUATION_STEP} has no {name}: run megahour evaluate in a new --run")
