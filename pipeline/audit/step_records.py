"""List a run by step, read each step's manifest and commits, and find where they disagree."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from infra.store.object_store import ObjectStore, StoreError, join_uri, read_checked
from pipeline.records import Tally
from pipeline.runs.commit import Commit, fingerprint
from pipeline.runs.manifest import (
    Manifest,
    Output,
    changed_versions,
    own_outputs,
    parse_manifest,
    read_part,
    sha256,
)
from pipeline.runs.names import (
    BASE_INPUT,
    CHECKPOINTS_FOLDER,
    COMMITS_FOLDER,
    INGEST_STEP,
    LANGUAGE_MODEL_SETTINGS,
    LEXICON_FILE,
    MANIFEST_FILE,
    REPORT_STEP,
    SCRATCH_FOLDER,
    SELECTION_FOLDER,
    STEP_RECORDS_FOLDER,
    STORE_CHECK_FOLDER,
    folder_of,
)
from pipeline.runs.sealed_json import unseal_exactly
from pipeline.steps.stream_means import STATISTIC, named_means

R = TypeVar("R")

_STORED = r"[0-9a-f]{2}/[^/]+-[0-9a-f]{16}[^/]*"
_STEP_OF = re.compile(
    rf"(.+)/{re.escape(MANIFEST_FILE)}"
    rf"|(.+?)/(?:{SCRATCH_FOLDER}/)?(?:{COMMITS_FOLDER}/[^/]+\.json|{_STORED})"
    rf"|(.+)/{CHECKPOINTS_FOLDER}/.+"
)
_PARTIAL = re.compile(r"(.*/)?\.partial-[^/]+")
_OF_A_TASK = re.compile(rf"{_STORED}|{CHECKPOINTS_FOLDER}/\d+-rank-\d+-[0-9a-f]{{16}}\.npz")
_NOTE = re.compile(
    rf"{STEP_RECORDS_FOLDER}/(started/[a-z_]+\.json|[a-z_]+\.prom|increment/[a-z]+\.json)"
    rf"|{STORE_CHECK_FOLDER}/([Ba]([-/]b)?|race/[0-9a-f]{{32}})"
)
_SCRATCH = re.compile(rf"{SCRATCH_FOLDER}/({COMMITS_FOLDER}/[^/]+\.json|{_STORED})")
_TASK = re.compile(r"group-\d+|\d+")


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding states a fault of one object: what was expected and found, and the remedy."""

    object: str
    expected: str
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StepRecords:
    """A step's folder, the keys in it, its manifest if it has a whole one, and its commits by key.

    A step is a folder with a manifest, commits, checkpoints, or objects that a task stored.
    """

    step: str
    keys: tuple[str, ...]
    manifest: Manifest | None = None
    manifest_digest: str = ""
    commits: Mapping[str, Commit] = field(default_factory=dict)

    @property
    def manifest_key(self) -> str:
        """The key of its manifest, which may not exist yet."""
        return f"{self.step}/{MANIFEST_FILE}"

    @property
    def is_finished(self) -> bool:
        """True if it has its manifest."""
        return self.manifest_key in self.keys

    @property
    def commit_keys(self) -> list[str]:
        """The keys of its commit records."""
        return [key for key in self.keys if key.startswith(f"{self.step}/{COMMITS_FOLDER}/")]

    @property
    def checkpoint_keys(self) -> list[str]:
        """The keys of its checkpoints' records."""
        stored = (key for key in self.keys if key.startswith(f"{self.step}/{CHECKPOINTS_FOLDER}/"))
        return [key for key in stored if key.endswith(".json") and not is_partial(key)]

    @property
    def scratch(self) -> list[str]:
        """The keys that its tasks wrote for each other, and that no step reads once it is done."""
        return [key for key in self.keys if _SCRATCH.fullmatch(key.removeprefix(f"{self.step}/"))]

    def is_a_tasks(self, key: str) -> bool:
        """Return True if a task of the step, a rank or a killed writer left this object."""
        return is_partial(key) or bool(_OF_A_TASK.fullmatch(key.removeprefix(f"{self.step}/")))

    @property
    def has_tasks(self) -> bool:
        """True if tasks made its objects, which then hold utterances; ingest's are the corpus's.

        Without its commits these objects still have the names of tasks.
        """
        if self.manifest is None or self.step == INGEST_STEP:
            return False
        first = (*self.manifest.outputs[:1], *self.manifest.ledgers[:1])
        return bool(self.commit_keys) or any(_TASK.match(_name(each.key)) for each in first)

    @property
    def objects(self) -> list[Output]:
        """The outputs and ledgers that the manifest names, of this run."""
        found = self.manifest
        return list(own_outputs((*found.outputs, *found.ledgers))) if found else []

    @property
    def extra_objects(self) -> list[Output]:
        """The ranges of its id index, and its stream means, of which commits name some."""
        found = self.manifest
        ranges = own_outputs((*found.id_index, *found.stream_means)) if found else ()
        return [*ranges, *named_means(self.commits.values())]

    @property
    def committed(self) -> dict[Output, str]:
        """The objects that the commits name, each with the key of its commit."""
        return {
            output: key
            for key, commit in self.commits.items()
            for output in (*commit.outputs, *([commit.ledger] if commit.ledger else []))
        }

    def commit_key(self, task: str) -> str:
        """Return the key of a task's commit."""
        return f"{self.step}/{COMMITS_FOLDER}/{task}.json"

    @property
    def again(self) -> str:
        """The remedy for a manifest that its step makes again from its commits."""
        return f"remove {self.manifest_key} and run the step again"

    def remedy(self, output_key: str) -> str:
        """Say how to make a damaged object of this step again, with the same bytes."""
        for output, key in self.committed.items():
            if output.key == output_key:
                return (
                    f"remove {key} and {self.manifest_key} and run the step again: that task "
                    "makes the same bytes, and what was made from them stays good"
                )
        return self.again


@dataclass(frozen=True, slots=True)
class RunListing:
    """RunListing holds a run's steps, without their records, and the keys in no step's folder."""

    steps: tuple[StepRecords, ...]
    other_keys: tuple[str, ...]

    @property
    def keys(self) -> frozenset[str]:
        """All keys of the run."""
        return frozenset((*(key for step in self.steps for key in step.keys), *self.other_keys))

    @property
    def job_record_keys(self) -> list[str]:
        """The keys of the jobs' records."""
        in_folder = [key for key in self.other_keys if key.startswith(f"{STEP_RECORDS_FOLDER}/")]
        return [key for key in in_folder if not _NOTE.fullmatch(key) and not is_partial(key)]

    @property
    def note_keys(self) -> frozenset[str]:
        """The keys of what jobs say of themselves while they run, of metrics, of store checks."""
        return frozenset(filter(_NOTE.fullmatch, self.other_keys))


def is_partial(key: str) -> bool:
    """Return True for the file of a writer that was killed, or is at work."""
    return _PARTIAL.fullmatch(key) is not None


def list_run(store: ObjectStore, run_uri: str, corpus_uri: str) -> RunListing:
    """List the steps of a run in one listing, without a corpus that lies within the run."""
    base, corpus = f"{run_uri.rstrip('/')}/", f"{corpus_uri.rstrip('/')}/"
    found = [*store.list(run_uri), *store.leftovers(run_uri)]
    keys = [each.uri.removeprefix(base) for each in found if not each.uri.startswith(corpus)]
    steps = {match[match.lastindex or 0] for match in map(_STEP_OF.fullmatch, keys) if match}
    keys_of: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        folder = key.rpartition("/")[0]
        while folder and folder not in steps:
            folder = folder.rpartition("/")[0]
        keys_of[folder].append(key)
    listed = (StepRecords(step, tuple(keys_of[step])) for step in sorted(steps))
    return RunListing(tuple(listed), tuple(keys_of[""]))


def read_step(
    store: ObjectStore, run_uri: str, step: StepRecords
) -> tuple[StepRecords, list[Finding]]:
    """Read a listed step's manifest and commits; a finding for each that cannot be read."""
    findings: list[Finding] = []

    def read(key: str, parse: Callable[[bytes], R]) -> R | None:
        try:
            return read_checked(store, join_uri(run_uri, key), parse)
        except (ValueError, TypeError, KeyError) as error:
            remedy = f"remove {key} and run its step again"
            findings.append(Finding(key, "a whole record", str(error)[:300], remedy))
            return None

    def parse_whole(data: bytes) -> tuple[Manifest, str]:
        unseal_exactly(data, "restore it")
        return parse_manifest(store, run_uri, data), sha256(data)

    found = read(step.manifest_key, parse_whole) if step.is_finished else None
    manifest, digest = found or (None, "")
    for part in manifest.parts if manifest else ():
        try:
            read_part(store, run_uri, part)
        except ValueError as error:
            said = "a whole part of the manifest", str(error)[:300]
            findings.append(Finding(part.key, *said, step.again))
            manifest, digest = None, ""
    keys, commits = step.commit_keys, {}
    uris = [join_uri(run_uri, key) for key in keys]
    # The first reads are many in flight; only a damaged record is read again, by itself.
    for key, (_, fetched) in zip(keys, store.get_many(uris), strict=True):
        if isinstance(fetched, StoreError):
            raise fetched
        try:
            commit: Commit | None = _parse_commit(fetched.data)
        except (ValueError, TypeError, KeyError):
            commit = read(key, _parse_commit)
        if commit is not None:
            commits[key] = commit
    records = replace(step, manifest=manifest, manifest_digest=digest, commits=commits)
    return records, findings


def _parse_commit(data: bytes) -> Commit:
    """Read a commit without what its step alone needs, 3.7 kB of the 5.9 in memory."""
    unseal_exactly(data, "restore it")
    commit = Commit.from_bytes(data)
    kept = {name: each for name, each in commit.statistics.items() if name == STATISTIC}
    return replace(commit, statistics=kept)


def record_findings(records: StepRecords) -> Iterator[Finding]:
    """Yield a finding where a finished step's manifest and commits disagree or do not add up."""
    manifest, key = records.manifest, records.manifest_key
    assert manifest is not None, "only finished steps are compared"
    if manifest.step != records.step:
        expected, remedy = f"the manifest of {records.step}", "restore the step's own manifest"
        yield Finding(key, expected, f"of {manifest.step}", remedy)
    if not records.has_tasks or manifest.is_inherited:
        return
    made = fingerprint(manifest.config, manifest.inputs, manifest.versions)
    for name, commit in records.commits.items():
        if name != records.commit_key(commit.task):
            remedy = f"remove {name} and {key} and run the step again"
            yield Finding(name, "the commit of its own task", f"of {commit.task}", remedy)
        if commit.fingerprint != made:
            remedy = f"use a fresh --run, or remove {records.step} and run it again"
            changed = changed_versions(manifest.versions, commit.versions)
            found = f"{commit.fingerprint[:12]}{f' ({changed})' if changed else ''}"
            yield Finding(name, f"fingerprint {made[:12]}", found, remedy)
        accounted = commit.tally_out + commit.quarantined + commit.unselected
        if accounted != commit.tally_in:
            remedy = records.remedy(next((o.key for o in commit.outputs), ""))
            yield Finding(name, f"{_text(commit.tally_in)} accounted for", _text(accounted), remedy)
    committed, listed = records.committed, dict.fromkeys(records.objects)
    for output in listed:
        if output not in committed:
            said = "named alike by a commit", "by the manifest alone"
            yield Finding(output.key, *said, records.again)
    # An object's name begins with its task.
    tasks = (_TASK.match(_name(output.key)) for output in listed)
    expected_keys = {records.commit_key(match[0] if match else "") for match in tasks}
    for missing in sorted(expected_keys.difference(records.keys)):
        said = "there, as the manifest names its objects", "missing"
        yield Finding(missing, *said, records.again)
    for output, name in committed.items():
        if output not in listed:
            said = "named alike by the manifest", f"by {name} alone"
            yield Finding(output.key, *said, records.again)
    yield from _sums(records, manifest)


def _sums(records: StepRecords, manifest: Manifest) -> Iterator[Finding]:
    """Compare the totals of a manifest with the sums of what it and its commits list."""
    commits, base = records.commits.values(), manifest.extends
    totals = {
        "tally_in": [each.tally_in for each in commits],
        "tally_out": [output.tally for output in own_outputs(manifest.outputs)],
        "quarantined": [ledger.tally for ledger in own_outputs(manifest.ledgers)],
        "unselected": [each.unselected for each in commits],
    }
    for name, parts in totals.items():
        stated: Tally = getattr(manifest, name)
        total = sum([*parts, *([getattr(base, name)] if base else [])], Tally())
        if total != stated:
            expected = f"{_text(stated)} {name.removeprefix('tally_')}, as stated"
            yield Finding(records.manifest_key, expected, _text(total), records.again)


def input_findings(records: StepRecords, steps: Mapping[str, StepRecords]) -> Iterator[Finding]:
    """Yield a finding for each input whose manifest is missing or has changed since."""
    assert records.manifest is not None, "only finished steps are compared"
    # The user's files and metadata have no manifests; the base's inputs are its own.
    if records.manifest.is_inherited or folder_of(records.step) in {INGEST_STEP, SELECTION_FOLDER}:
        return
    for name, expected in records.manifest.inputs.items():
        if name.startswith(BASE_INPUT) or name in {LEXICON_FILE, *LANGUAGE_MODEL_SETTINGS}:
            continue  # the base's own, or an object of the corpus
        if records.step == REPORT_STEP and name.endswith(".json"):
            continue  # a record, a plan or another run's report: sealed documents
        remedy = f"remove {records.step} and what was made from it, and run those steps again"
        key, read = f"{name}/{MANIFEST_FILE}", steps.get(name)
        if read is None or not read.is_finished:
            yield Finding(key, f"there, as {records.step} read it", "missing", remedy)
        elif read.manifest and read.manifest_digest != expected:
            found = f"SHA-256 {read.manifest_digest[:16]}"
            yield Finding(key, f"SHA-256 {expected[:16]}, as {records.step} read it", found, remedy)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _text(tally: Tally) -> str:
    return f"{tally.utterances:,} utterances, {tally.duration_ms:,} ms"
