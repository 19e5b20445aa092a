"""Exactly-once commits: shards under their digest, one conditional record a task, one manifest.

A task puts its shards under keys that hold their digests, so that a late attempt can never
overwrite committed bytes, and then its record with If-None-Match. The first attempt wins. A
second one looks for its commit before it works; one at work at the same time is compared.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, read_checked
from pipeline.records import Quarantined, Tally
from pipeline.runs.manifest import (
    MAX_LISTED,
    Output,
    OutputPart,
    Outputs,
    OutputsInParts,
    changed_versions,
    listed,
    read_output,
    read_part,
    sha256,
    step_versions,
    to_document,
)
from pipeline.runs.names import COMMITS_FOLDER, LEDGER_SUFFIX, PART_SUFFIX, SCRATCH_FOLDER
from pipeline.runs.sealed_json import read_sealed, seal, typed_record

P = ParamSpec("P")


class Repetition(Enum):
    """Repetition says what another attempt at a task makes, and so which difference is a fault."""

    SAME_BYTES = "same bytes"
    """Wherever it runs. An attempt whose bytes differ fails the step."""
    OTHER_LAST_BITS = "other last bits"
    """On another kind of device or processor. The first commit is taken."""


class RecipeConflictError(ValueError):
    """RecipeConflictError says what another recipe, or other inputs, have begun, and a remedy."""

    def __init__(self, said: str, remedy: str, named: Sequence[str] = ()) -> None:
        super().__init__(said, remedy, named)  # what unpickling gives back
        self.said, self.remedy, self.named = said, remedy, named

    def __str__(self) -> str:
        return f"{self.said}{listed(self.named)}: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit records the outputs of one task, the unit of restart."""

    task: str
    fingerprint: str
    outputs: tuple[Output, ...] = ()
    ledger: Output | None = None
    tally_in: Tally = field(default_factory=Tally)
    quarantined: Tally = field(default_factory=Tally)
    unselected: Tally = field(default_factory=Tally)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    # The fingerprint covers them; here they are for the error that names what differs.
    versions: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def tally_out(self) -> Tally:
        """The sum of the outputs' tallies."""
        return sum((output.tally for output in self.outputs), Tally())

    def to_bytes(self) -> bytes:
        """Write canonical JSON with its digest."""
        document = asdict(self)
        document["outputs"] = to_document(self.outputs)
        document["ledger"] = to_document((self.ledger,))[0] if self.ledger else None
        return seal(document)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Commit":
        """Read what `to_bytes` wrote; ValueError if it is damaged."""
        remedy = (
            "the commit record is damaged, or of an older version: remove it and run its step "
            "again, which repeats this one task"
        )
        return read_sealed(data, remedy, cls._from_document)

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> "Commit":
        for name in ("tally_in", "quarantined", "unselected"):
            document[name] = typed_record(Tally, document[name])
        document["outputs"] = tuple(typed_record(Output, each) for each in document["outputs"])
        if document["ledger"] is not None:
            document["ledger"] = typed_record(Output, document["ledger"])
        return typed_record(cls, document)

    def is_same_work(self, other: "Commit") -> bool:
        """Return whether two attempts did one task: equal but for the bytes that they made."""
        outputs, ledger, statistics = other.outputs, other.ledger, other.statistics
        return replace(self, outputs=outputs, ledger=ledger, statistics=statistics) == other


@dataclass(frozen=True, slots=True)
class StepContext:
    """StepContext holds a step's place, fingerprint and versions, and travels to every task."""

    store: ObjectStore
    run_uri: str
    step: str
    fingerprint: str
    versions: Mapping[str, str]
    repetition: Repetition = Repetition.SAME_BYTES

    @property
    def scratch(self) -> "StepContext":
        """The context of tasks below scratch/ in the step's folder, which no manifest names."""
        return replace(self, step=f"{self.step}/{SCRATCH_FOLDER}")

    def commit_uri(self, task: str) -> str:
        """Return the URI of a task's commit record."""
        return join_uri(self.run_uri, self.step, COMMITS_FOLDER, f"{task}.json")

    def read(self, output: Output) -> bytes:
        """Read an object that a manifest or commit of the run names, and check its digest."""
        return read_output(self.store, self.run_uri, output)

    def put_output(self, task: str, suffix: str, data: bytes, tally: Tally) -> Output:
        """Store `data` under a key that holds its digest; hashed early, as S3 shards by prefix."""
        content = sha256(data)
        key = f"{self.step}/{content[:2]}/{task}-{content[:16]}{suffix}"
        self.store.put(join_uri(self.run_uri, key), data)
        return Output(key, len(data), content, tally.utterances, tally.duration_ms)

    def put_ledger(self, task: str, rows: Sequence[Quarantined]) -> Output | None:
        """Store the quarantine ledger of one task, if there is anything in it."""
        if not rows:
            return None
        data = "".join(row.to_json() + "\n" for row in rows).encode()
        stored = self.put_output(task, LEDGER_SUFFIX, data, Tally.of(rows))
        return replace(stored, reasons=dict(Counter(row.reason for row in rows)))

    def put_parts(self, name: str, lines: Iterable[bytes]) -> OutputsInParts:
        """Store a long list of outputs, a line each, in parts; a manifest then names the parts."""
        parts: list[OutputPart] = []
        rest = iter(lines)
        while some := list(islice(rest, MAX_LISTED)):
            task = f"{name}-{len(parts):06d}"
            stored = self.put_output(task, PART_SUFFIX, b"".join(some), Tally())
            parts.append(OutputPart(stored.key, stored.num_bytes, stored.sha256, len(some)))
        return OutputsInParts(parts, functools.partial(read_part, self.store, self.run_uri))

    def in_parts(self, name: str, outputs: Outputs) -> Outputs:
        """Return outputs as a manifest holds them: a long list in parts, which are then stored."""
        if len(outputs) <= MAX_LISTED or isinstance(outputs, OutputsInParts):
            return outputs
        return self.put_parts(name, (output.to_line() for output in outputs))

    def committed(self, task: str) -> Commit | None:
        """Read the commit of an earlier attempt at `task`, if there is one."""
        try:
            found = read_checked(self.store, self.commit_uri(task), Commit.from_bytes)
        except ObjectNotFound:
            return None
        self.require_ours(found)
        return found

    def commit(self, record: Commit) -> Commit:
        """Commit a task's record once; return that of the first attempt.

        ValueError if the first attempt made other bytes, where they must be the same.
        """
        uri = self.commit_uri(record.task)
        data = replace(record, versions=self.versions).to_bytes()
        # If-None-Match: of a task's attempts, retried or speculative, one record wins.
        if self.store.put_if_absent(uri, data):
            return record
        winner = read_checked(self.store, uri, Commit.from_bytes)
        self.require_ours(winner)
        # Equal bytes may be this attempt's own, if the answer to its write was lost.
        if winner.to_bytes() == data:
            return record
        if self.repetition is Repetition.OTHER_LAST_BITS and winner.is_same_work(record):
            return winner
        raise ValueError(
            f"{uri} holds other digests than this attempt made: the task is not "
            "deterministic, or two recipes share one --run; use a fresh --run"
        )

    def require_ours(self, commit: Commit) -> None:
        """Raise a ValueError if `commit` is of another recipe, other inputs or other versions."""
        if commit.fingerprint == self.fingerprint:
            return
        if changed := changed_versions(commit.versions, self.versions):
            raise ValueError(
                f"{self.step}: task {commit.task} was committed by other versions ({changed}): "
                f"finish the step with the former, or remove {self.step} and run it again"
            )
        raise RecipeConflictError(
            f"{self.step}: task {commit.task} was committed under another recipe or other inputs",
            f"use another --run, or remove {self.step}",
        )

    def require_versions(self) -> None:
        """Raise a ValueError if this worker has other versions than the driver."""
        installed = step_versions(self.step, tuple(self.versions))  # the step's own engines, too
        of_driver = {name: self.versions.get(name, "none") for name in installed}
        if changed := changed_versions(of_driver, installed):
            raise ValueError(
                f"{self.step}: the driver and this worker differ in versions ({changed}): "
                "install the driver's on the cluster (megahour package)"
            )


@runtime_checkable
class Task(Protocol):
    """Task is what a task's function gets: the name of its commit and the context of its step."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def context(self) -> StepContext:
        """The step's context."""
        ...


T = TypeVar("T", bound=Task)
R = TypeVar("R")


def once(run_task: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], Commit | R]:
    """Let a task's function return the commit of an earlier attempt instead of working again."""

    @functools.wraps(run_task)
    def run_once(task: T, /, *args: P.args, **kwargs: P.kwargs) -> Commit | R:
        task.context.require_versions()
        return task.context.committed(task.name) or run_task(task, *args, **kwargs)

    return run_once


def fingerprint(
    config: Mapping[str, Any], inputs: Mapping[str, str], versions: Mapping[str, str]
) -> str:
    """Digest a step's resolved configuration, inputs and versions: equal for equal work."""
    return sha256(json.dumps([config, inputs, versions], sort_keys=True).encode())


def step_context(
    store: ObjectStore,
    run_uri: str,
    step: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    repetition: Repetition = Repetition.SAME_BYTES,
    engines: Sequence[str] = (),
) -> StepContext:
    """Make the context of a step with this configuration and these inputs, as installed here."""
    versions = step_versions(step, engines)
    digest = fingerprint(config, inputs, versions)
    return StepContext(store, run_uri, step, digest, versions, repetition)


def committed_tasks(context: StepContext) -> dict[str, Commit]:
    """Read the commits of earlier attempts at this step by task: one LIST, in the driver."""
    commits = read_commits(context.store, context.run_uri, context.step)
    for commit in commits:
        context.require_ours(commit)
    return {commit.task: commit for commit in commits}


def read_commits(store: ObjectStore, run_uri: str, step: str) -> list[Commit]:
    """Read all commits of a step, whatever its recipe and inputs."""
    return list(each_commit(store, commit_uris(store, run_uri, step)))


def commit_uris(store: ObjectStore, run_uri: str, step: str) -> list[str]:
    """List the commits of a step."""
    return [each.uri for each in store.list(join_uri(run_uri, step, COMMITS_FOLDER))]


def each_commit(store: ObjectStore, uris: Sequence[str]) -> Iterator[Commit]:
    """Read commits, many in flight; StoreError if one cannot be read."""
    for uri, found in store.get_many(uris):
        if isinstance(found, Exception):
            raise found
        try:
            commit = Commit.from_bytes(found.data)
        except ValueError:
            # A second read separates damage on the way from damage at rest.
            commit = read_checked(store, uri, Commit.from_bytes)
        yield commit
