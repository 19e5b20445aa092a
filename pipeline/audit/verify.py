"""Verify a run: sizes, digests and counts of all that its manifests name, to the utterance.

The sealed records beside the manifests are checked, too: of jobs, checkpoints, report and plan.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, read_checked
from pipeline.audit.conservation import chain_findings
from pipeline.audit.corpus_objects import audio_findings, corpus_findings, in_doubt
from pipeline.audit.step_records import (
    Finding,
    RunListing,
    StepRecords,
    input_findings,
    is_partial,
    list_run,
    read_step,
    record_findings,
)
from pipeline.audit.stored_objects import Holding, Reader, SealedRecord
from pipeline.runs.engine import Distribute
from pipeline.runs.manifest import Output, differences, manifest_uri, sha256
from pipeline.runs.names import (
    COMMAND_LINE_SETTINGS,
    FEATURES_FOLDER,
    INGEST_STEP,
    PLAN_CALIBRATION,
    PLAN_DOCUMENT,
    REPORT_DOCUMENT,
    REPORT_PAGE,
    REPORT_STEP,
    folder_of,
    job_record,
)
from pipeline.runs.sealed_json import named_objects, unseal_exactly
from pipeline.steps.stream_means import named_means

_REPORT_REMEDY = "run megahour report again"
_PLAN_REMEDY = "run megahour plan --run again"
_CHECKPOINT_REMEDY = (
    "remove this checkpoint with its record: training resumes from the one before it; a finished "
    "model needs none, and its job, run again, records what is there"
)


Progress = Callable[[int, int], None]
"""Receives the bytes just read, and the bytes to be read in all."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expectation holds what a recipe and its jobs make: settings by step, and steps by job.

    Some runs lack the optional steps.
    """

    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    jobs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    optional: Collection[str] = ()


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
    expectation: Expectation,
) -> Iterator[Finding]:
    """Yield a finding for each record that is missing, or that belongs to something else.

    Runs of the library alone have no job records: they are
    expected where the corpus was ingested, or where any job has left one.
    """
    yield from records.findings
    finished = {name for name, step in steps.items() if step.folder.is_finished}
    if INGEST_STEP in finished or listing.job_record_keys:
        yield from _missing_jobs(listing, finished, expectation)
    for record in records.records:
        if record.key in listing.job_record_keys:
            made = expectation.jobs.get(_job_of(record.key), ())
            yield from _job_faults(record, [step for step in made if step in finished], steps)
    if REPORT_STEP in finished and REPORT_DOCUMENT not in listing.keys:
        expected = f"there, as {REPORT_STEP} is finished"
        yield Finding(REPORT_DOCUMENT, expected, "missing", _REPORT_REMEDY)
    for record in records.records:
        if record.key == REPORT_DOCUMENT and REPORT_STEP in finished:
            yield from _report_faults(record, steps[REPORT_STEP])
    if PLAN_CALIBRATION in listing.keys and PLAN_DOCUMENT not in listing.keys:
        yield Finding(PLAN_DOCUMENT, f"there, beside {PLAN_CALIBRATION}", "missing", _PLAN_REMEDY)


def _missing_jobs(
    listing: RunListing, finished: set[str], expectation: Expectation
) -> Iterator[Finding]:
    for job, made in expectation.jobs.items():
        required = {*made}.difference(expectation.optional)
        if required <= finished and job_record(job) not in listing.keys:
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


@dataclass(frozen=True, slots=True)
class Verification:
    """Verification holds what was read, the findings, and keys below the run that are not needed.

    An orphan was stored by a task that never committed it, or by a writer that was killed. What
    is in `scratch` was committed by tasks of steps that are finished, and no step reads it again.
    """

    steps: tuple[str, ...]
    num_objects: int
    num_bytes: int
    findings: tuple[Finding, ...]
    orphans: tuple[str, ...]
    scratch: tuple[str, ...]
    unfinished: tuple[str, ...]


def verify_run(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    progress: Progress,
    expectation: Expectation = Expectation(),
    reads_audio: bool = False,
    distribute: Distribute | None = None,
) -> Verification:
    """Read all objects that the run's manifests and records name, and compare them with these.

    Tasks read them, where `distribute` runs tasks, or else this process; findings are the same.
    Of each utterance and step 12 bytes are kept, on local disk where they are many; shards are
    read 8 at a time. Audio in S3 that a
    listing's ETags confirm is not read, unless `reads_audio`; local audio is read.
    """
    # Listed before commits are read: what a task commits meanwhile is then no orphan.
    listing = list_run(store, run_uri, corpus_uri)
    findings: list[Finding] = []
    steps: dict[str, StepRecords] = {}
    for folder in listing.folders:
        steps[folder.step], unreadable = read_step(store, run_uri, folder)
        findings += unreadable
    records = read_records(store, run_uri, listing)
    findings += record_faults(records, listing, steps, expectation)
    finished = {name: found for name, found in steps.items() if found.manifest}
    for name, found in finished.items():
        findings += [*record_findings(found), *input_findings(found, steps)]
        findings += base_findings(store, found)
        findings += _recipe_findings(found, expectation.configs.get(name))
    work = _Work(store, run_uri, corpus_uri, finished, records, distribute)
    findings += work.findings(progress, reads_audio)
    orphans, strays = _unnamed(listing, steps, records)
    return Verification(
        steps=tuple(steps),
        num_objects=work.num_objects,
        num_bytes=work.num_bytes,
        findings=(*findings, *strays),
        orphans=orphans,
        scratch=tuple(
            key for folder in listing.folders if folder.is_finished for key in folder.scratch
        ),
        unfinished=tuple(folder.step for folder in listing.folders if not folder.is_finished),
    )


@dataclass(slots=True)
class _Work:
    """The objects of a run and its corpus, and how many of them have been read."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    finished: Mapping[str, StepRecords]
    records: RunRecords
    distribute: Distribute | None
    num_objects: int = 0
    num_bytes: int = 0

    def findings(self, progress: Progress, reads_audio: bool) -> Iterator[Finding]:
        """Read the objects, and yield what is wrong with them and with their utterances."""
        outputs = {
            name: [*found.objects, *found.indexes, *named_means(found.commits.values())]
            for name, found in self.finished.items()
        }
        named = self.records.named
        place = (self.store, self.run_uri, self.corpus_uri)

        def advance(num_bytes: int) -> None:
            self.num_objects, self.num_bytes = self.num_objects + 1, self.num_bytes + num_bytes
            progress(num_bytes, total)

        total = sum(each.num_bytes for part in (*outputs.values(), named) for each in part)
        reader, holdings = Reader(*place, advance, self.distribute), dict[str, Holding]()
        # Features first: what is kept of their audio goes before other steps' utterances come.
        features = [name for name in outputs if folder_of(name) == FEATURES_FOLDER]
        yield from self._read_steps(reader, features, outputs, holdings)
        if INGEST_STEP in outputs and not reads_audio:
            everything = outputs[INGEST_STEP]
            outputs[INGEST_STEP] = in_doubt(self.store, self.corpus_uri, everything, holdings)
            total -= sum(each.num_bytes for each in set(everything) - set(outputs[INGEST_STEP]))
        ingested = [name for name in outputs if name == INGEST_STEP]
        yield from self._read_steps(reader, ingested, outputs, holdings)
        yield from audio_findings(*place, holdings, reads_audio, self.distribute)
        for holding in holdings.values():
            holding.audio.clear()
        others = [name for name in outputs if name not in (*features, *ingested)]
        yield from self._read_steps(reader, others, outputs, holdings)
        yield from reader.read_named(named)
        yield from corpus_findings(*place, self.finished, self.distribute)
        yield from chain_findings(self.store, self.run_uri, self.finished, holdings)

    def _read_steps(
        self,
        reader: Reader,
        names: Sequence[str],
        outputs: Mapping[str, Sequence[Output]],
        holdings: dict[str, Holding],
    ) -> Iterator[Finding]:
        for name in names:
            holding, damaged = reader.read_step(self.finished[name], outputs[name])
            yield from damaged
            if holding is not None:
                holdings[name] = holding


def base_findings(store: ObjectStore, records: StepRecords) -> Iterator[Finding]:
    """Yield a finding if the manifest that an increment's step extends is gone or has changed.

    The base's objects are verified there.
    """
    assert records.manifest is not None, "only finished steps are compared"
    extends = records.manifest.extends
    if extends is None:
        return
    uri = manifest_uri(extends.run, records.step)
    remedy = "put it back; or remove the increment, and extend a run that is whole"
    expected = f"SHA-256 {extends.sha256[:16]}, as {records.step} extends it"
    try:
        digest = sha256(store.get(uri))
    except ObjectNotFound:
        yield Finding(uri, expected, "missing", remedy)
        return
    if digest != extends.sha256:
        yield Finding(uri, expected, f"SHA-256 {digest[:16]}", remedy)


def _recipe_findings(records: StepRecords, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Compare the settings of a step's manifest with those that the recipe decides.

    A setting that one of them does not state is at its default there. A manifest without any, as
    of a model from elsewhere, is not compared.
    """
    if config is None or records.manifest is None or not records.manifest.config:
        return
    manifest = records.manifest
    given = [name for name in COMMAND_LINE_SETTINGS if name in manifest.config]
    said = {**{name: manifest.config[name] for name in given}, **config}
    if differing := differences(manifest, said, manifest.inputs).removeprefix(": "):
        remedy = "give the recipe that made the run, with its --set, or use another --run"
        yield Finding(records.folder.manifest_key, "the recipe's settings", differing, remedy)


def _unnamed(
    listing: RunListing, steps: Mapping[str, StepRecords], records: RunRecords
) -> tuple[tuple[str, ...], list[Finding]]:
    """Orphans, and strays: objects below the run that none of its tasks and jobs stored."""
    named = {output.key for output in records.named}
    # A damaged or missing document that names one is the finding.
    named.update(listing.note_keys)
    named.update((REPORT_DOCUMENT, REPORT_PAGE, PLAN_CALIBRATION))
    named.update(record.key for record in records.records)
    named.update(finding.object for finding in records.findings)
    orphans, strays = [], []
    for name, found in steps.items():
        folder = found.folder
        if folder.is_finished and found.manifest is None:
            continue  # only its damaged manifest says what belongs to it
        known = {folder.manifest_key, *found.parts, *folder.commit_keys, *folder.scratch}
        known.update(
            output.key
            for output in (
                *found.objects,
                *found.indexes,
                *found.committed,
                *named_means(found.commits.values()),
            )
        )
        for key in folder.keys:
            if key in known or key in named:
                continue
            if folder.is_a_tasks(key):
                orphans.append(key)
            else:
                strays.append(_stray(key, f"only objects of {name}"))
    for key in listing.other_keys:
        if is_partial(key):
            orphans.append(key)
        elif key not in named:
            strays.append(_stray(key, "only objects of the run's steps"))
    return tuple(orphans), strays


def _stray(key: str, expected: str) -> Finding:
    remedy = "find its writer, and move it out of the run"
    return Finding(key, expected, "an object that no task stored", remedy)


def sweep(store: ObjectStore, run_uri: str, verification: Verification) -> None:
    """Delete orphans and scratch; a ValueError, and nothing deleted, while a step may need one.

    A step at work stores objects before it names them, and a damaged record may name some.
    """
    if verification.unfinished:
        raise ValueError(
            f"nothing swept: {', '.join(verification.unfinished)} unfinished, and what its tasks "
            "store looks like orphans until they commit: finish the step, or remove its folder"
        )
    if verification.findings:
        raise ValueError(
            f"nothing swept: {len(verification.findings)} findings; fix them first, as a damaged "
            "record may name what looks like an orphan"
        )
    keys = (*verification.orphans, *verification.scratch)
    store.delete_many([join_uri(run_uri, key) for key in keys])
