"""Verify a run: sizes, digests and counts of all that its manifests name, to the utterance.

The sealed records beside the manifests are checked, too: of jobs, checkpoints, report and plan.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, read_checked
from pipeline.audit.conservation import chain_findings
from pipeline.audit.corpus_objects import audio_findings, corpus_findings, digest_findings, in_doubt
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
from pipeline.audit.stored_objects import Holding, Wanted, counts, read_objects
from pipeline.runs.engine import Distribute
from pipeline.runs.manifest import Output, differences, manifest_uri
from pipeline.runs.names import (
    CHECKPOINTS_FOLDER,
    COMMAND_LINE_SETTINGS,
    FEATURES_FOLDER,
    INGEST_STEP,
    LEDGER_SUFFIX,
    PLAN_CALIBRATION,
    PLAN_DOCUMENT,
    REPORT_DOCUMENT,
    REPORT_PAGE,
    REPORT_STEP,
    SELECTION_FOLDER,
    folder_of,
    job_record,
)
from pipeline.runs.sealed_json import named_objects, unseal_exactly

_REPORT_REMEDY = "run megahour report again"
_PLAN_REMEDY = "run megahour plan --run again"
_CHECKPOINT_REMEDY = (
    "remove this checkpoint with its record: training resumes from the one before it; a finished "
    "model needs none, and its job, run again, records what is there"
)


GETS_IN_FLIGHT = 8
"""Shards of 100 MB in memory at a time."""

_CHECKPOINTS_IN_FLIGHT = 2
"""Checkpoints of 1 GB in memory at a time."""

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
class SealedRecord:
    """SealedRecord is a record as it is stored, and the objects below the run that it names."""

    key: str
    document: Mapping[str, Any]
    objects: tuple[Output, ...]
    remedy: str


def read_records(
    store: ObjectStore, run_uri: str, listing: RunListing
) -> tuple[dict[str, SealedRecord], list[Finding]]:
    """Read all sealed records of a run, by key; a finding for each that cannot be read."""
    wanted = {key: ("", _job_remedy(_job_of(key))) for key in listing.job_record_keys}
    for step in listing.steps:
        folder = f"{step.step}/{CHECKPOINTS_FOLDER}/"
        wanted |= dict.fromkeys(step.checkpoint_keys, (folder, _CHECKPOINT_REMEDY))
    documents = {REPORT_DOCUMENT: ("", _REPORT_REMEDY), PLAN_DOCUMENT: ("", _PLAN_REMEDY)}
    wanted |= {key: each for key, each in documents.items() if key in listing.keys}
    records, findings = {}, []
    for key, (folder, remedy) in wanted.items():
        try:
            unsealed = partial(unseal_exactly, remedy=remedy)
            document = read_checked(store, join_uri(run_uri, key), unsealed)
            named = named_objects(document)
        except ObjectNotFound:
            continue  # a training at work removes outdated checkpoints
        except (ValueError, TypeError) as error:
            findings.append(Finding(key, "a whole record", str(error)[:300], remedy))
            continue
        objects = tuple(Output(folder + o.key, o.num_bytes, o.sha256, 0, 0) for o in named)
        records[key] = SealedRecord(key, document, objects, remedy)
    return records, findings


def record_faults(
    records: Mapping[str, SealedRecord],
    listing: RunListing,
    steps: Mapping[str, StepRecords],
    expectation: Expectation,
) -> Iterator[Finding]:
    """Yield a finding for each record that is missing, or that belongs to something else.

    Runs of the library alone have no job records: they are expected where the corpus was ingested,
    or where any job has left one.
    """
    finished = {name for name, step in steps.items() if step.is_finished}
    if INGEST_STEP in finished or listing.job_record_keys:
        for job, made in expectation.jobs.items():
            required = {*made}.difference(expectation.optional)
            if required <= finished and job_record(job) not in listing.keys:
                there = ", ".join(step for step in made if step in finished)
                expected = f"there, as {there} finished"
                yield Finding(job_record(job), expected, "missing", _job_remedy(job))
    for key in listing.job_record_keys:
        if key in records:
            made = expectation.jobs.get(_job_of(key), ())
            yield from _job_faults(records[key], [steps[each] for each in made if each in finished])
    if REPORT_STEP in finished and REPORT_DOCUMENT not in listing.keys:
        expected = f"there, as {REPORT_STEP} is finished"
        yield Finding(REPORT_DOCUMENT, expected, "missing", _REPORT_REMEDY)
    if REPORT_STEP in finished and REPORT_DOCUMENT in records:
        report = steps[REPORT_STEP].manifest
        if report and records[REPORT_DOCUMENT].document.get("inputs") != report.inputs:
            expected, found = f"of the inputs of {REPORT_STEP}", "a report of other inputs"
            yield Finding(REPORT_DOCUMENT, expected, found, _REPORT_REMEDY)
    if PLAN_CALIBRATION in listing.keys and PLAN_DOCUMENT not in listing.keys:
        yield Finding(PLAN_DOCUMENT, f"there, beside {PLAN_CALIBRATION}", "missing", _PLAN_REMEDY)


def _job_faults(record: SealedRecord, made: Sequence[StepRecords]) -> Iterator[Finding]:
    job, named = _job_of(record.key), {each.key for each in record.objects}
    if record.document.get("step") != job:
        found = f"of {record.document.get('step')}"
        yield Finding(record.key, f"the record of {job}", found, record.remedy)
    for step in made:
        if step.manifest_key not in named:
            found = f"{step.manifest_key} not among them"
            yield Finding(record.key, "the manifests of its steps named", found, record.remedy)
        # Once a model is finished, no checkpoint is added to those that its job named.
        for key in sorted({*step.checkpoint_keys} - named):
            yield Finding(key, f"named by {record.key}", "not named", _CHECKPOINT_REMEDY)


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
    Twelve bytes an utterance and step are kept, on local disk if there are many; shards are read 8
    at a time. Audio in S3 that a listing's ETags confirm is not read, unless `reads_audio`; local
    audio is read.
    """
    # Listed before commits are read: what a task commits meanwhile is then no orphan.
    listing = list_run(store, run_uri, corpus_uri)
    findings: list[Finding] = []
    steps: dict[str, StepRecords] = {}
    for listed in listing.steps:
        steps[listed.step], unreadable = read_step(store, run_uri, listed)
        findings += unreadable
    records, damaged = read_records(store, run_uri, listing)
    findings += [*damaged, *record_faults(records, listing, steps, expectation)]
    finished = {name: found for name, found in steps.items() if found.manifest}
    for name, found in finished.items():
        findings += [*record_findings(found), *input_findings(found, steps)]
        findings += base_findings(store, found)
        findings += _recipe_findings(found, expectation.configs.get(name))
    reader = _Reader(store, run_uri, corpus_uri, finished, records, distribute, progress)
    findings += reader.findings(reads_audio)
    orphans, strays = _unnamed(listing, steps, records, damaged)
    return Verification(
        steps=tuple(steps),
        num_objects=reader.num_objects,
        num_bytes=reader.num_bytes,
        findings=(*findings, *strays),
        orphans=orphans,
        scratch=tuple(key for step in listing.steps if step.is_finished for key in step.scratch),
        unfinished=tuple(step.step for step in listing.steps if not step.is_finished),
    )


@dataclass(slots=True)
class _Reader:
    """Reads the objects of a run and its corpus, and counts those that have been read."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    finished: Mapping[str, StepRecords]
    records: Mapping[str, SealedRecord]
    distribute: Distribute | None
    progress: Progress
    holdings: dict[str, Holding] = field(default_factory=dict)
    total: int = 0
    num_objects: int = 0
    num_bytes: int = 0

    def findings(self, reads_audio: bool) -> Iterator[Finding]:
        """Read the objects, and yield what is wrong with them and with their utterances."""
        outputs = {
            name: [*found.objects, *found.extra_objects] for name, found in self.finished.items()
        }
        named = {each: record for record in self.records.values() for each in record.objects}
        self.total = sum(each.num_bytes for part in (*outputs.values(), named) for each in part)
        # Features first: what is kept of their audio goes before other steps' utterances come.
        features = [name for name in outputs if folder_of(name) == FEATURES_FOLDER]
        for name in features:
            yield from self._read_step(name, outputs.pop(name))
        if INGEST_STEP in outputs:
            ingested = outputs.pop(INGEST_STEP)
            if not reads_audio:
                wanted = in_doubt(self.store, self.corpus_uri, ingested, self.holdings)
                self.total -= sum(each.num_bytes for each in set(ingested) - set(wanted))
                ingested = wanted
            yield from self._read_step(INGEST_STEP, ingested)
        yield from audio_findings(
            self.store, self.run_uri, self.corpus_uri, self.holdings, reads_audio, self.distribute
        )
        for holding in self.holdings.values():
            holding.audio.clear()
        for name, each in outputs.items():
            yield from self._read_step(name, each)
        yield from self._read_named(named)
        yield from corpus_findings(
            self.store, self.run_uri, self.corpus_uri, self.finished, self.distribute
        )
        yield from chain_findings(self.store, self.run_uri, self.finished, self.holdings)

    def _read_step(self, step: str, outputs: Sequence[Output]) -> Iterator[Finding]:
        """Read objects of a step; where one cannot be read, the step's utterances are unknown."""
        records, holding, is_whole = self.finished[step], Holding(), True

        def base_of(output: Output) -> str:
            # The outputs of ingest are the corpus's, its ledger is the run's.
            is_corpus = step == INGEST_STEP and not output.key.endswith(LEDGER_SUFFIX)
            return self.corpus_uri if is_corpus else self.run_uri

        has_tasks = records.has_tasks
        wanted = [Wanted(output, base_of(output), has_tasks) for output in outputs]
        for output, found in read_objects(
            self.store, self.corpus_uri, wanted, GETS_IN_FLIGHT, self.distribute
        ):
            self._advance(output)
            base = base_of(output)
            where = output.key if base == self.run_uri else join_uri(base, output.key)
            if found.damage:
                is_whole = False
                yield Finding(where, _bytes(output), found.damage, records.remedy(output.key))
            if found.miscount:
                yield Finding(where, counts(output), found.miscount, records.remedy(output.key))
            holding.add(output, found)
        if is_whole:
            self.holdings[step] = holding

    def _read_named(self, named: Mapping[Output, SealedRecord]) -> Iterator[Finding]:
        """Read objects below the run that records name."""
        wanted = [Wanted(output, self.run_uri, has_utterances=False) for output in named]
        for output, found in read_objects(
            self.store, self.corpus_uri, wanted, _CHECKPOINTS_IN_FLIGHT, self.distribute
        ):
            self._advance(output)
            # A training at work removes an outdated checkpoint's record before its objects.
            if found.damage and self.store.exists(join_uri(self.run_uri, named[output].key)):
                yield Finding(output.key, _bytes(output), found.damage, named[output].remedy)

    def _advance(self, output: Output) -> None:
        self.num_objects += 1
        self.num_bytes += output.num_bytes
        self.progress(output.num_bytes, self.total)


def _bytes(output: Output) -> str:
    return f"{output.num_bytes:,} bytes, SHA-256 {output.sha256[:16]}"


def base_findings(store: ObjectStore, records: StepRecords) -> Iterator[Finding]:
    """Yield a finding if the manifest that an increment's step extends is gone or has changed.

    The base's objects are verified there.
    """
    if records.manifest is not None and (extends := records.manifest.extends) is not None:
        digests = {manifest_uri(extends.run, records.step): extends.sha256}
        remedy = "put it back; or remove the increment, and extend a run that is whole"
        yield from digest_findings(store, digests, f"as {records.step} extends it", remedy)


def _recipe_findings(records: StepRecords, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Compare the settings of a step's manifest with those that the recipe decides.

    A setting that one of them does not state is at its default there. A manifest without any, as
    of a model from elsewhere, is not compared, nor an inherited selection, which is of all speech
    of its subset.
    """
    if config is None or records.manifest is None or not records.manifest.config:
        return
    manifest = records.manifest
    if manifest.is_inherited and folder_of(records.step) == SELECTION_FOLDER:
        return
    given = [name for name in COMMAND_LINE_SETTINGS if name in manifest.config]
    said = {**{name: manifest.config[name] for name in given}, **config}
    if differing := differences(manifest, said, manifest.inputs).removeprefix(": "):
        remedy = "give the recipe that made the run, with its --set, or use another --run"
        yield Finding(records.manifest_key, "the recipe's settings", differing, remedy)


def _unnamed(
    listing: RunListing,
    steps: Mapping[str, StepRecords],
    records: Mapping[str, SealedRecord],
    damaged: Sequence[Finding],
) -> tuple[tuple[str, ...], list[Finding]]:
    """Orphans, and strays: objects below the run that none of its tasks and jobs stored."""
    # A damaged or missing document that names one is the finding.
    named = {*listing.note_keys, REPORT_DOCUMENT, REPORT_PAGE, PLAN_CALIBRATION, *records}
    named.update(each.key for record in records.values() for each in record.objects)
    named.update(finding.object for finding in damaged)
    orphans, strays = list[str](), list[Finding]()

    def sort(key: str, expected: str, is_orphan: bool) -> None:
        if is_orphan:
            orphans.append(key)
        elif key not in named:
            remedy = "find its writer, and move it out of the run"
            strays.append(Finding(key, expected, "an object that no task stored", remedy))

    for name, found in steps.items():
        if found.is_finished and found.manifest is None:
            continue  # only its damaged manifest says what belongs to it
        objects = (*found.objects, *found.extra_objects, *found.committed)
        parts = found.manifest.parts if found.manifest else ()
        known = {found.manifest_key, *found.commit_keys, *found.scratch}
        known.update(each.key for each in (*objects, *parts))
        for key in found.keys:
            if key not in known and key not in named:
                sort(key, f"only objects of {name}", found.is_a_tasks(key))
    for key in listing.other_keys:
        sort(key, "only objects of the run's steps", is_partial(key))
    return tuple(orphans), strays


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
