"""Check the sealed records beside the manifests: of jobs, checkpoints, report and plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from infra.store.checked_reads import read_checked
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from pipeline.audit.run_listing import RunListing
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.audit.stored_objects import SealedRecord
from pipeline.runs.manifest import Output
from pipeline.runs.names import (
    INGEST_STEP,
    OPTIONAL_STEPS,
    PLAN_CALIBRATION,
    PLAN_DOCUMENT,
    REPORT_DOCUMENT,
    REPORT_STEP,
    job_record,
)
from pipeline.runs.sealed_json import named_objects, unseal_exactly

_REPORT_REMEDY = "run megahour report again"
_PLAN_REMEDY = "run megahour plan --run again"
_CHECKPOINT_REMEDY = (
    "remove this checkpoint with its record: training resumes from the one before it; a finished "
    "model needs none, and its job, run again, records what is there"
)


@dataclass(frozen=True, slots=True)
class RunRecords:
    """RunRecords holds the whole records of a run, and findings for the others."""

    records: list[SealedRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def named(self) -> dict[Output, SealedRecord]:
        """The objects that the records name, each with its record."""
        return {each: record for record in self.records for each in record.objects}


def read_records(store: ObjectStore, run_uri: str, listing: RunListing) -> RunRecords:
    """Read all sealed records of a run."""
    found = RunRecords()
    for key in listing.job_record_keys:
        _read(store, run_uri, key, "", _job_remedy(_job_of(key)), found)
    for folder in listing.folders:
        for key in folder.checkpoint_keys:
            _read(store, run_uri, key, f"{folder.checkpoints}/", _CHECKPOINT_REMEDY, found)
    for key, remedy in ((REPORT_DOCUMENT, _REPORT_REMEDY), (PLAN_DOCUMENT, _PLAN_REMEDY)):
        if key in listing.keys:
            _read(store, run_uri, key, "", remedy, found)
    return found


def _read(
    store: ObjectStore, run_uri: str, key: str, folder: str, remedy: str, found: RunRecords
) -> None:
    try:
        document = read_checked(store, join_uri(run_uri, key), lambda d: unseal_exactly(d, remedy))
        named = named_objects(document)
    except ObjectNotFound:
        return  # a training at work removes outdated checkpoints
    except (ValueError, TypeError) as error:
        found.findings.append(Finding(key, "a whole record", str(error)[:300], remedy))
        return
    objects = tuple(Output(folder + o.key, o.num_bytes, o.sha256, 0, 0) for o in named)
    found.records.append(SealedRecord(key, document, objects, remedy))


def record_faults(
    records: RunRecords,
    listing: RunListing,
    steps: Mapping[str, StepRecords],
    jobs: Mapping[str, Sequence[str]],
) -> Iterator[Finding]:
    """Yield a finding for each record that is missing, or that belongs to something else.

    `jobs` holds the steps of each job. Runs of the library alone have no job records: they are
    expected where the corpus was ingested, or where any job has left one.
    """
    yield from records.findings
    finished = {name for name, step in steps.items() if step.folder.is_finished}
    if INGEST_STEP in finished or listing.job_record_keys:
        yield from _missing_jobs(listing, finished, jobs)
    for record in records.records:
        if record.key in listing.job_record_keys:
            made = [step for step in jobs.get(_job_of(record.key), ()) if step in finished]
            yield from _job_faults(record, made, steps)
    if REPORT_STEP in finished and REPORT_DOCUMENT not in listing.keys:
        expected = f"there, as {REPORT_STEP} is finished"
        yield Finding(REPORT_DOCUMENT, expected, "missing", _REPORT_REMEDY)
    for record in records.records:
        if record.key == REPORT_DOCUMENT and REPORT_STEP in finished:
            yield from _report_faults(record, steps[REPORT_STEP])
    if PLAN_CALIBRATION in listing.keys and PLAN_DOCUMENT not in listing.keys:
        yield Finding(PLAN_DOCUMENT, f"there, beside {PLAN_CALIBRATION}", "missing", _PLAN_REMEDY)


def _missing_jobs(
    listing: RunListing, finished: set[str], jobs: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    for job, made in jobs.items():
        if (
            finished.issuperset({*made} - OPTIONAL_STEPS.keys())
            and job_record(job) not in listing.keys
        ):
            expected = f"there, as {', '.join(step for step in made if step in finished)} finished"
            yield Finding(job_record(job), expected, "missing", _job_remedy(job))


def _job_faults(
    record: SealedRecord, made: Sequence[str], steps: Mapping[str, StepRecords]
) -> Iterator[Finding]:
    job = _job_of(record.key)
    if record.document.get("step") != job:
        found = f"of {record.document.get('step')}"
        yield Finding(record.key, f"the record of {job}", found, record.remedy)
    named = {each.key for each in record.objects}
    for step in made:
        folder = steps[step].folder
        if folder.manifest_key not in named:
            found = f"{folder.manifest_key} not among them"
            yield Finding(record.key, "the manifests of its steps named", found, record.remedy)
        # Once a model is finished, no checkpoint is added to those that its job named.
        for key in set(folder.checkpoint_keys) - named:
            yield Finding(key, f"named by {record.key}", "not named", _CHECKPOINT_REMEDY)


def _report_faults(record: SealedRecord, report: StepRecords) -> Iterator[Finding]:
    inputs = report.manifest.inputs if report.manifest else None
    if inputs is not None and record.document.get("inputs") != inputs:
        found = "a report of other inputs"
        yield Finding(record.key, f"of the inputs of {REPORT_STEP}", found, record.remedy)


def _job_of(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")


def _job_remedy(job: str) -> str:
    return f"put it back; or run megahour {job} again, whose record then names what is there"
