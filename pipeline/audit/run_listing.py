"""List a run by step: manifest, commits, and other objects."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from infra.store.object_store import ObjectStore
from pipeline.runs.names import CHECKPOINTS_FOLDER, COMMITS_FOLDER, MANIFEST_FILE, SCRATCH_FOLDER

_STORED = r"[0-9a-f]{2}/[^/]+-[0-9a-f]{16}[^/]*"
_STEP_OF = (
    re.compile(rf"(.+)/{re.escape(MANIFEST_FILE)}"),
    re.compile(rf"(.+?)/(?:{SCRATCH_FOLDER}/)?{COMMITS_FOLDER}/[^/]+\.json"),
    re.compile(rf"(.+?)/(?:{SCRATCH_FOLDER}/)?{_STORED}"),
    re.compile(rf"(.+)/{CHECKPOINTS_FOLDER}/.+"),
)
_OF_A_TASK = re.compile(rf"{SCRATCH_FOLDER}/.+|{_STORED}")
_PARTIAL = re.compile(r"(.*/)?\.partial-[^/]+")


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

    def unnamed(self, named: frozenset[str]) -> list[str]:
        """Return the keys that are neither in `named` nor part of the step's layout."""
        known = tuple(f"{self.step}/{name}/" for name in (COMMITS_FOLDER, CHECKPOINTS_FOLDER))
        return [
            key
            for key in self.keys
            if key != self.manifest_key and key not in named and not key.startswith(known)
        ]

    def is_a_tasks(self, key: str) -> bool:
        """Return True if a task of the step or a killed writer left this object."""
        name = key.removeprefix(f"{self.step}/")
        return (_OF_A_TASK.fullmatch(name) or _PARTIAL.fullmatch(name)) is not None


def list_run(store: ObjectStore, run_uri: str, corpus_uri: str) -> list[StepFolder]:
    """List the steps of a run in one listing, without a corpus that lies within the run."""
    base, corpus = f"{run_uri.rstrip('/')}/", f"{corpus_uri.rstrip('/')}/"
    found = [*store.list(run_uri), *store.leftovers(run_uri)]
    keys = [each.uri.removeprefix(base) for each in found if not each.uri.startswith(corpus)]
    matches = (pattern.fullmatch(key) for key in keys for pattern in _STEP_OF)
    steps = {match[1] for match in matches if match}
    keys_of = defaultdict(list)
    for key in sorted(keys):
        step = next((folder for folder in _folders(key) if folder in steps), None)
        if step is not None:
            keys_of[step].append(key)
    return [StepFolder(step, tuple(keys_of[step])) for step in sorted(steps)]


def _folders(key: str) -> Iterator[str]:
    """Yield the folders that hold `key`, the innermost first."""
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key
