"""List all that a report is made from, so that a change of any of it makes the report again."""

from collections.abc import Iterable, Mapping

from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.catalogue import REPORT
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import input_digests, is_finished, manifest_uri, read_manifest, sha256
from pipeline.runs.names import (
    CERTIFICATE_STEP,
    KBEST_COSTS_STEP,
    PLAN_DOCUMENT,
    REPORT_STEP,
    STEP_RECORDS_FOLDER,
    job_record,
)
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step

LATER_STEPS = (KBEST_COSTS_STEP, CERTIFICATE_STEP)
"""Steps that a run may have or lack, and that may be made after a report."""


def report_spec(
    store: ObjectStore, run_uri: str, reads: Iterable[str], other_reports: Mapping[str, str]
) -> StepSpec:
    """Return the step of a report: its manifests, and the digests of all other documents.

    Those are the jobs' records, the plan, which names its calibration, and other runs' reports,
    whose digests are given by URI.
    """
    later = [step for step in LATER_STEPS if is_finished(store, run_uri, step)]
    return StepSpec(
        store,
        run_uri,
        REPORT_STEP,
        {},
        tuple(dict.fromkeys((*reads, *later))),
        {**_documents(store, run_uri), **other_reports},
    )


def _documents(store: ObjectStore, run_uri: str) -> dict[str, str]:
    """Return the digests of records and plan by key."""
    uris = record_uris(store, run_uri)
    plan = join_uri(run_uri, PLAN_DOCUMENT)
    if store.exists(plan):
        uris.append(plan)
    return {uri.removeprefix(f"{run_uri}/"): sha256(store.get(uri)) for uri in uris}


def record_uris(store: ObjectStore, run_uri: str) -> list[str]:
    """List the jobs' records, without the report's own; metrics and notes of a begun job are none.

    A record's URI is the one that its name has.
    """
    listed = [found.uri for found in store.list(join_uri(run_uri, STEP_RECORDS_FOLDER))]
    records = [uri for uri in listed if uri == join_uri(run_uri, job_record(_job_of(uri)))]
    return [uri for uri in records if _job_of(uri) != REPORT]


def _job_of(uri: str) -> str:
    return uri.rpartition("/")[2].removesuffix(".json")


def run_report(spec: StepSpec, contents: StepContents) -> StepResult:
    """Store the manifest of a report, in place of one that was made from other inputs."""
    if is_finished(spec.store, spec.run_uri, spec.step):
        stored = read_manifest(spec.store, spec.run_uri, spec.step)
        reads = input_digests(spec.store, spec.run_uri, spec.reads)
        if stored.inputs != {**reads, **spec.digests}:
            # A report has no readers among the steps: the newest one is the only one.
            spec.store.delete(manifest_uri(spec.run_uri, spec.step))

    def make(_: StepContext) -> StepContents:
        return contents

    return run_step(spec, make)
