"""List a run by step, read each step's manifest and commits, and find where they disagree."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
from pipeline.steps.stream_means import STATISTIC

_STORED = r"[0-9a-f]{2}/[^/]+-[0-9a-f]{16}[^/]*"
_STEP_OF = (
    re.compile(rf"(.+)/{re.escape(MANIFEST_FILE)}"),
    re.compile(rf"(.+?)/(?:{SCRATCH_FOLDER}/)?{COMMITS_FOLDER}/[^/]+\.json"),
    re.compile(rf"(.+?)/(?:{SCRATCH_FOLDER}/)?{_STORED}"),
    re.compile(rf"(.+)/{CHECKPOINTS_FOLDER}/.+"),
)
_PARTIAL = re.compile(r"(.*/)?\.partial-[^/]+")
_OF_A_TASK = re.compile(rf"{_STORED}|{CHECKPOINTS_FOLDER}/\d+-rank-\d+-[0-9a-f]{{16}}\.npz")
_NOTE = re.compile(
    rf"{STEP_RECORDS_FOLDER}/(begun/[a-z_]+\.json|[a-z_]+\.prom|increment/[a-z]+\.json)"
    rf"|{STORE_CHECK_FOLDER}/[Ba]([-/]b)?"
)
_SCRATCH = re.compile(rf"{SCRATCH_FOLDER}/({COMMITS_FOLDER}/[^/]+\.json|{_STORED})")


@dataclass(frozen=True, slots=True)
class StepFolder:
    """One step's folder and the keys in it, below the run.

    A step is a folder with a manifest, commits, checkpoints, or objects that a task stored.
    """

    step: str
    keys: tuple[str, ...]

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
    def checkpoints(self) -> str:
        """The folder of its checkpoints."""
        return f"{self.step}/{CHECKPOINTS_FOLDER}"

    @property
    def checkpoint_keys(self) -> list[str]:
        """The keys of its checkpoints' records."""
        return [
            key
            for key in self.keys
            if key.startswith(f"{self.checkpoints}/")
            and key.endswith(".json")
            and not is_partial(key)
        ]

    @property
    def scratch(self) -> list[str]:
        """The keys that its tasks wrote for each other, and that no step reads once it is done."""
        return [key for key in self.keys if _SCRATCH.fullmatch(self._name(key))]

    def is_a_tasks(self, key: str) -> bool:
        """Return True if a task of the step, a rank or a killed writer left this object."""
        return is_partial(key) or _OF_A_TASK.fullmatch(self._name(key)) is not None

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self.step}/")


@dataclass(frozen=True, slots=True)
class RunListing:
    """RunListing holds a run's step folders, and the keys in no step's folder."""

    folders: tuple[StepFolder, ...]
    other_keys: tuple[str, ...]

    @property
    def keys(self) -> frozenset[str]:
        """All keys of the run."""
        of_steps = (key for folder in self.folders for key in folder.keys)
        return frozenset((*of_steps, *self.other_keys))

    @property
    def job_record_keys(self) -> list[str]:
        """The keys of the jobs' records."""
        folder = f"{STEP_RECORDS_FOLDER}/"
        notes = self.note_keys
        in_folder = [key for key in self.other_keys if key.startswith(folder)]
        return [key for key in in_folder if key not in notes and not is_partial(key)]

    @property
    def note_keys(self) -> frozenset[str]:
        """The keys of what jobs say of themselves while they run, of metrics, of store checks."""
        return frozenset(key for key in self.other_keys if _NOTE.fullmatch(key))


def is_partial(key: str) -> bool:
    """Return True for the file of a writer that was killed, or is at work."""
    return _PARTIAL.fullmatch(key) is not None


def list_run(store: ObjectStore, run_uri: str, corpus_uri: str) -> RunListing:
    """List the steps of a run in one listing, without a corpus that lies within the run."""
    base, corpus = f"{run_uri.rstrip('/')}/", f"{corpus_uri.rstrip('/')}/"
    found = [*store.list(run_uri), *store.leftovers(run_uri)]
    keys = [each.uri.removeprefix(base) for each in found if not each.uri.startswith(corpus)]
    matches = (pattern.fullmatch(key) for key in keys for pattern in _STEP_OF)
    steps = {match[1] for match in matches if match}
    keys_of: dict[str | None, list[str]] = defaultdict(list)
    for key in sorted(keys):
        step = next((folder for folder in _folders(key) if folder in steps), None)
        keys_of[step].append(key)
    folders = [StepFolder(step, tuple(keys_of[step])) for step in sorted(steps)]
    return RunListing(tuple(folders), tuple(keys_of[None]))


def _folders(key: str) -> Iterator[str]:
    """Yield the folders that hold `key`, the innermost first."""
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key


R = TypeVar("R")

GETS_IN_FLIGHT = 32

_RESTORE = "restore it"
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
    """A step's folder, its manifest if it has a whole one, and its commits by key."""

    folder: StepFolder
    manifest: Manifest | None
    manifest_digest: str
    commits: Mapping[str, Commit]

    @property
    def step(self) -> str:
        """The step's name, its folder below the run."""
        return self.folder.step

    @property
    def has_tasks(self) -> bool:
        """True if tasks made its objects, which then hold utterances; ingest's are the corpus's.

        Without its commits these objects still have the names of tasks.
        """
        if self.manifest is None or self.step == INGEST_STEP:
            return False
        if self.folder.commit_keys:
            return True
        objects = (*self.manifest.outputs[:1], *self.manifest.ledgers[:1])
        return any(_TASK.match(each.key.rpartition("/")[2]) for each in objects)

    @property
    def objects(self) -> list[Output]:
        """The objects that the manifest names, of this run."""
        if self.manifest is None:
            return []
        return [*own_outputs(self.manifest.outputs), *own_outputs(self.manifest.ledgers)]

    @property
    def indexes(self) -> tuple[Output, ...]:
        """The ranges of its id index and stream means, which tasks commit as scratch."""
        found = self.manifest
        return own_outputs((*found.id_index, *found.stream_means)) if found else ()

    @property
    def parts(self) -> list[str]:
        """The keys of the parts of the manifest's lists."""
        return [part.key for part in self.manifest.parts] if self.manifest else []

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

    def expected_commit(self, output: Output) -> str:
        """Return the key of the commit of an object's task, with which its name begins."""
        match = _TASK.match(output.key.rpartition("/")[2])
        return self.commit_key(match[0] if match else "")

    def remedy(self, output_key: str) -> str:
        """Say how to make a damaged object of this step again, with the same bytes."""
        keys = {output.key: key for output, key in self.committed.items()}
        if output_key not in keys:
            return f"remove {self.folder.manifest_key} and run the step again"
        return (
            f"remove {keys[output_key]} and {self.folder.manifest_key} and run the step again: "
            "that task makes the same bytes, and what was made from them stays good"
        )


def read_step(
    store: ObjectStore, run_uri: str, folder: StepFolder
) -> tuple[StepRecords, list[Finding]]:
    """Read a step's manifest and commits; a finding for each that cannot be read."""
    findings: list[Finding] = []
    manifest, digest = None, ""
    if folder.is_finished:
        uri = join_uri(run_uri, folder.manifest_key)
        parse = partial(_parse_manifest, store, run_uri)
        found = _read(store, uri, folder.manifest_key, parse, findings)
        manifest, digest = found or (None, "")
    if manifest is not None and (damaged := list(_part_findings(store, run_uri, manifest))):
        findings += damaged
        manifest, digest = None, ""
    commits = {}
    uris = [join_uri(run_uri, key) for key in folder.commit_keys]
    # The first reads are many in flight; only a damaged record is read again, by itself.
    for key, (uri, fetched) in zip(
        folder.commit_keys, store.get_many(uris, GETS_IN_FLIGHT), strict=True
    ):
        if isinstance(fetched, StoreError):
            raise fetched
        try:
            commit: Commit | None = _parse_commit(fetched.data)
        except (ValueError, TypeError, KeyError):
            commit = _read(store, uri, key, _parse_commit, findings)
        if commit is not None:
            commits[key] = commit
    return StepRecords(folder, manifest, digest, commits), findings


def _parse_manifest(store: ObjectStore, run_uri: str, data: bytes) -> tuple[Manifest, str]:
    unseal_exactly(data, _RESTORE)
    return parse_manifest(store, run_uri, data), sha256(data)


def _part_findings(store: ObjectStore, run_uri: str, manifest: Manifest) -> Iterator[Finding]:
    for part in manifest.parts:
        try:
            read_part(store, run_uri, part)
        except ValueError as error:
            remedy = f"remove {manifest.step}/{MANIFEST_FILE} and run the step again"
            yield Finding(part.key, "a whole part of the manifest", str(error)[:300], remedy)


def _parse_commit(data: bytes) -> Commit:
    """Read a commit without what its step alone needs, 3.7 kB of the 5.9 in memory."""
    unseal_exactly(data, _RESTORE)
    commit = Commit.from_bytes(data)
    kept = {name: each for name, each in commit.statistics.items() if name == STATISTIC}
    return replace(commit, statistics=kept)


def _read(
    store: ObjectStore, uri: str, key: str, parse: Callable[[bytes], R], findings: list[Finding]
) -> R | None:
    try:
        return read_checked(store, uri, parse)
    except (ValueError, TypeError, KeyError) as error:
        remedy = f"remove {key} and run its step again"
        findings.append(Finding(key, "a whole record", str(error)[:300], remedy))
        return None


def record_findings(records: StepRecords) -> Iterator[Finding]:
    """Yield a finding where a finished step's manifest and commits disagree or do not add up."""
    manifest, key = records.manifest, records.folder.manifest_key
    assert manifest is not None, "only finished steps are compared"
    if manifest.step != records.step:
        yield Finding(
            key,
            f"the manifest of {records.step}",
            f"of {manifest.step}",
            "restore the step's own manifest",
        )
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
    yield from _named_by_one(records)
    yield from _sums(records, manifest)


def _named_by_one(records: StepRecords) -> Iterator[Finding]:
    committed, listed = records.committed, set(records.objects)
    remedy = f"remove {records.folder.manifest_key} and run the step again"
    for output in records.objects:
        if output not in committed:
            yield Finding(output.key, "named alike by a commit", "by the manifest alone", remedy)
    expected = set(map(records.expected_commit, records.objects))
    for key in sorted(expected.difference(records.folder.keys)):
        yield Finding(key, "there, as the manifest names its objects", "missing", remedy)
    for output, commit in committed.items():
        if output not in listed:
            yield Finding(output.key, "named alike by the manifest", f"by {commit} alone", remedy)


def _sums(records: StepRecords, manifest: Manifest) -> Iterator[Finding]:
    commits = records.commits.values()
    pairs = {
        "in": (manifest.tally_in, [each.tally_in for each in commits]),
        "out": (manifest.tally_out, [output.tally for output in own_outputs(manifest.outputs)]),
        "quarantined": (
            manifest.quarantined,
            [ledger.tally for ledger in own_outputs(manifest.ledgers)],
        ),
        "unselected": (manifest.unselected, [each.unselected for each in commits]),
    }
    if base := manifest.extends:
        pairs["in"][1].append(base.tally_in)
        pairs["out"][1].append(base.tally_out)
        pairs["quarantined"][1].append(base.quarantined)
        pairs["unselected"][1].append(base.unselected)
    for name, (stated, parts) in pairs.items():
        total = sum(parts, Tally())
        if total != stated:
            key = records.folder.manifest_key
            remedy = f"remove {key} and run the step again"
            yield Finding(key, f"{_text(stated)} {name}, as stated", _text(total), remedy)


def input_findings(records: StepRecords, steps: Mapping[str, StepRecords]) -> Iterator[Finding]:
    """Yield a finding for each input whose manifest is missing or has changed since."""
    assert records.manifest is not None, "only finished steps are compared"
    for name, expected in records.manifest.inputs.items():
        if records.manifest.is_inherited or name.startswith(BASE_INPUT):
            continue  # the base's own
        if folder_of(records.step) in {INGEST_STEP, SELECTION_FOLDER}:
            continue  # the user's files and metadata have no manifests
        if name in {LEXICON_FILE, *LANGUAGE_MODEL_SETTINGS}:
            continue  # an object of the corpus
        if records.step == REPORT_STEP and name.endswith(".json"):
            continue  # a record, a plan or another run's report: sealed documents
        remedy = f"remove {records.step} and what was made from it, and run those steps again"
        key = f"{name}/{MANIFEST_FILE}"
        if name not in steps or not steps[name].folder.is_finished:
            yield Finding(key, f"there, as {records.step} read it", "missing", remedy)
        elif steps[name].manifest and steps[name].manifest_digest != expected:
            found = f"SHA-256 {steps[name].manifest_digest[:16]}"
            yield Finding(key, f"SHA-256 {expected[:16]}, as {records.step} read it", found, remedy)


def _text(tally: Tally) -> str:
    return f"{tally.utterances:,} utterances, {tally.duration_ms:,} ms"
