"""Exactly-once commits: shards under their digest, one conditional record a task, one manifest.

A task puts its shards under keys that hold their digests, so that a late attempt can never
overwrite committed bytes, and then its record with If-None-Match. The first attempt wins; a
second one must have made the same bytes, or the step is not deterministic and fails.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infra.store.checked_reads import read_checked
from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined, Tally
from pipeline.runs.manifest import (
    Output,
    sha256,
)
from pipeline.runs.names import COMMITS_FOLDER, LEDGER_SUFFIX
from pipeline.runs.sealed_json import seal, unseal


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit records the outputs of one task, the unit of restart."""

    task: str
    fingerprint: str
    outputs: tuple[Output, ...]
    ledger: Output | None
    tally_in: Tally
    quarantined: Tally
    unselected: Tally = field(default_factory=Tally)
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tally_out(self) -> Tally:
        """The sum of the outputs' tallies."""
        return sum((output.tally for output in self.outputs), Tally())

    def to_bytes(self) -> bytes:
        """Write canonical JSON with its digest."""
        return seal(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Commit":
        """Read what `to_bytes` wrote; ValueError if it is damaged."""
        document = unseal(
            data,
            "the commit record is damaged, or of an older version: remove it and run its step "
            "again, which repeats this one task",
        )
        for name in ("tally_in", "quarantined", "unselected"):
            document[name] = Tally(**document[name])
        document["outputs"] = tuple(Output(**output) for output in document["outputs"])
        document["ledger"] = Output(**document["ledger"]) if document["ledger"] else None
        return cls(**document)


@dataclass(frozen=True, slots=True)
class StepContext:
    """StepContext holds a step's place and fingerprint, and travels to every task."""

    store: ObjectStore
    run_uri: str
    step: str
    fingerprint: str

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
        return self.put_output(task, LEDGER_SUFFIX, data, Tally.of(rows))

    def commit(self, record: Commit) -> Commit:
        """Commit a task's record once; a second attempt must have made the same bytes."""
        uri = join_uri(self.run_uri, self.step, COMMITS_FOLDER, f"{record.task}.json")
        if self.store.put_if_absent(uri, record.to_bytes()):
            return record
        winner = read_checked(self.store, uri, Commit.from_bytes)
        if winner.to_bytes() != record.to_bytes():
            raise ValueError(
                f"{uri} holds other digests than this attempt made: the task is not "
                "deterministic, or two recipes share one --run; use a fresh --run"
            )
        return winner


def fingerprint(config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Digest a step's resolved configuration and inputs: equal work has an equal fingerprint."""
    return sha256(json.dumps([config, inputs], sort_keys=True).encode())


def step_context(
    store: ObjectStore,
    run_uri: str,
    step: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
) -> StepContext:
    """Make the context of a step with this configuration and these inputs' digests."""
    return StepContext(store, run_uri, step, fingerprint(config, inputs))


def committed_tasks(context: StepContext) -> dict[str, Commit]:
    """Read the commits of earlier attempts at this step by task: one LIST, in the driver."""
    commits = read_commits(context.store, context.run_uri, context.step)
    for commit in commits:
        if commit.fingerprint != context.fingerprint:
            raise ValueError(
                f"{context.step}: task {commit.task} was committed under another recipe or other "
                f"inputs; use another --run, or remove {context.step}"
            )
    return {commit.task: commit for commit in commits}


def read_commits(store: ObjectStore, run_uri: str, step: str) -> list[Commit]:
    """Read all commits of a step, whatever its recipe and inputs."""
    objects = store.list(join_uri(run_uri, step, COMMITS_FOLDER))
    commits = []
    for uri, found in store.get_many([each.uri for each in objects]):
        if isinstance(found, Exception):
            raise found
        try:
            commits.append(Commit.from_bytes(found.data))
        except ValueError:
            commits.append(read_checked(store, uri, Commit.from_bytes))
    return commits
