"""List a run by step: manifest, commits, checkpoints, scratch, and other objects."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from infra.store.object_store import ObjectStore
from pipeline.runs.names import (
    CHECKPOINTS_FOLDER,
    COMMITS_FOLDER,
    MANIFEST_FILE,
    SCRATCH_FOLDER,
    STEP_RECORDS_FOLDER,
    STORE_CHECK_FOLDER,
)

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
