"""Verify a run: sizes, digests and counts of all that its manifests name, to the utterance."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.store.object_store import ObjectStore, join_uri
from infra.store.uris import is_s3
from pipeline.audit.conservation import chain_findings
from pipeline.audit.corpus_objects import audio_findings, corpus_findings, is_audio
from pipeline.audit.run_listing import RunListing, is_partial, list_run
from pipeline.audit.sealed_records import RunRecords, read_records, record_faults
from pipeline.audit.step_records import (
    Finding,
    StepRecords,
    input_findings,
    read_step,
    record_findings,
)
from pipeline.audit.stored_objects import Holding, Reader
from pipeline.runs.manifest import Output
from pipeline.runs.names import (
    FEATURES_FOLDER,
    INGEST_STEP,
    PLAN_CALIBRATION,
    REPORT_DOCUMENT,
    REPORT_PAGE,
    folder_of,
)
from pipeline.runs.step import differences

Progress = Callable[[int, int], None]
"""Receives the bytes just read, and the bytes to be read in all."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expectation holds what a recipe and its jobs make: settings by step, and steps by job."""

    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    jobs: Mapping[str, Sequence[str]] = field(default_factory=dict)


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
) -> Verification:
    """Read all objects that the run's manifests and records name, and compare them with these.

    Of each utterance and step 8 bytes are kept; shards are read 8 at a time. Audio in S3 is
    compared by a listing's sizes and ETags, unless `reads_audio`; local audio is read.
    """
    # Listed before commits are read: what a task commits meanwhile is then no orphan.
    listing = list_run(store, run_uri, corpus_uri)
    findings: list[Finding] = []
    steps: dict[str, StepRecords] = {}
    for folder in listing.folders:
        steps[folder.step], unreadable = read_step(store, run_uri, folder)
        findings += unreadable
    records = read_records(store, run_uri, listing)
    findings += record_faults(records, listing, steps, expectation.jobs)
    finished = {name: found for name, found in steps.items() if found.manifest}
    for name, found in finished.items():
        findings += [*record_findings(found), *input_findings(found, steps)]
        findings += _recipe_findings(found, expectation.configs.get(name))
    work = _Work(store, run_uri, corpus_uri, finished, records, reads_audio)
    findings += work.findings(progress)
    orphans, strays = _unnamed(listing, steps, records)
    return Verification(
        steps=tuple(steps),
        num_objects=len(work.objects),
        num_bytes=sum(output.num_bytes for output in work.objects),
        findings=(*findings, *strays),
        orphans=orphans,
        scratch=tuple(
            key for folder in listing.folders if folder.is_finished for key in folder.scratch
        ),
        unfinished=tuple(folder.step for folder in listing.folders if not folder.is_finished),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The objects to read of a run and its corpus."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    finished: Mapping[str, StepRecords]
    records: RunRecords
    reads_audio: bool

    @property
    def objects(self) -> list[Output]:
        """All objects whose bytes are compared."""
        of_steps = (each for found in self.finished.values() for each in self._of_step(found))
        return [*of_steps, *self.records.named]

    def findings(self, progress: Progress) -> Iterator[Finding]:
        """Read the objects, and yield what is wrong with them and with their utterances."""
        total = sum(each.num_bytes for each in self.objects)

        def advance(num_bytes: int) -> None:
            progress(num_bytes, total)

        reader = Reader(self.store, self.run_uri, self.corpus_uri, advance)
        place = (self.store, self.run_uri)
        holdings: dict[str, Holding] = {}
        # Features first: what is kept of their audio goes before other steps' utterances come.
        hear = [name for name in self.finished if folder_of(name) in (INGEST_STEP, FEATURES_FOLDER)]
        yield from self._read_steps(reader, hear, holdings)
        yield from audio_findings(*place, self.corpus_uri, holdings, self.reads_audio)
        for holding in holdings.values():
            holding.audio.clear()
        others = [name for name in self.finished if name not in hear]
        yield from self._read_steps(reader, others, holdings)
        yield from reader.read_named(self.records.named)
        yield from corpus_findings(self.store, self.corpus_uri, self.finished)
        yield from chain_findings(*place, self.finished, holdings)

    def _read_steps(
        self, reader: Reader, names: Sequence[str], holdings: dict[str, Holding]
    ) -> Iterator[Finding]:
        for name in names:
            found = self.finished[name]
            holding, damaged = reader.read_step(found, self._of_step(found))
            yield from damaged
            if holding is not None:
                holdings[name] = holding

    def _of_step(self, found: StepRecords) -> list[Output]:
        reads_all = self.reads_audio or not is_s3(self.corpus_uri)
        if found.step != INGEST_STEP or reads_all:
            return found.objects
        return [output for output in found.objects if not is_audio(output)]


def _recipe_findings(records: StepRecords, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Compare the settings that both the step's manifest and the recipe state."""
    if config is None or records.manifest is None:
        return
    manifest = records.manifest
    said = {name: config.get(name, value) for name, value in manifest.config.items()}
    if differing := differences(manifest, said, manifest.inputs).removeprefix(": "):
        remedy = "give the recipe that made the run, with its --set, or use another --run"
        yield Finding(records.folder.manifest_key, "the recipe's settings", differing, remedy)


def _unnamed(
    listing: RunListing, steps: Mapping[str, StepRecords], records: RunRecords
) -> tuple[tuple[str, ...], list[Finding]]:
    """Orphans, and strays: objects below the run that none of its tasks and jobs stored."""
    named = {output.key for output in records.named}
    # Where the document that names one is damaged or missing, that is the finding.
    named.update((REPORT_DOCUMENT, REPORT_PAGE, PLAN_CALIBRATION))
    named.update(record.key for record in records.records)
    named.update(finding.object for finding in records.findings)
    orphans, strays = [], []
    for name, found in steps.items():
        folder = found.folder
        if folder.is_finished and found.manifest is None:
            continue  # only its damaged manifest says what belongs to it
        known = {folder.manifest_key, *folder.commit_keys, *folder.scratch}
        known.update(output.key for output in (*found.objects, *found.committed))
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
    for key in (*verification.orphans, *verification.scratch):
        store.delete(join_uri(run_uri, key))
