"""Errors that a change could plant into the commit protocol, as patches of the real code."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from infra.store.object_store import ObjectStore, join_uri
from infra.store.s3 import S3Store
from pipeline.records import Quarantined, Tally
from pipeline.runs import engine, sealed_json
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.engine import StepRun
from pipeline.runs.manifest import Manifest, Output, OutputsInParts, manifest_uri, sha256
from pipeline.runs.names import COMMITS_FOLDER, PART_SUFFIX
from tests.simulation import simulated_step
from tests.simulation.simulated_s3 import SimulatedStore
from tests.simulation.simulated_step import SCORES_SUFFIX

Patch = pytest.MonkeyPatch


def bytes_of(context: StepContext, record: Commit) -> bytes:
    return replace(record, versions=context.versions).to_bytes()


def manifest_replaced(patch: Patch) -> None:
    """The manifest is stored plainly."""

    def write(context: StepContext, made: Manifest) -> None:
        context.store.put(manifest_uri(context.run_uri, context.step), made.to_bytes())

    patch.setattr(engine, "write_manifest", write)


def second_manifest_accepted(patch: Patch) -> None:
    """A driver whose manifest came second reports success."""

    def write(context: StepContext, made: Manifest) -> None:
        context.store.put_if_absent(manifest_uri(context.run_uri, context.step), made.to_bytes())

    patch.setattr(engine, "write_manifest", write)


def manifest_before_the_commits(patch: Patch) -> None:
    """The manifest lists the tasks that were committed when the step began; then the rest run."""
    run_tasks = engine.run_tasks

    def of_the_committed(step: StepRun, plan: Any) -> Manifest:
        committed = engine.committed_tasks(step.context)
        done = {name: task for name, task in plan.tasks.items() if name in committed}
        made = run_tasks(step, replace(plan, tasks=done))
        run_tasks(step, plan)
        return made

    patch.setattr(simulated_step, "run_tasks", of_the_committed)


def commit_before_the_shards(patch: Patch) -> None:
    """A task stores its record first, and then what the record names."""
    put_output, put_commit = StepContext.put_output, StepContext.commit
    waiting: list[tuple[Any, ...]] = []

    def postpone(context: StepContext, task: str, suffix: str, data: bytes, tally: Tally) -> Output:
        if suffix == SCORES_SUFFIX:  # of a step without tasks
            return put_output(context, task, suffix, data, tally)
        waiting.append((context, task, suffix, data, tally))
        return output_of(context, task, suffix, data, tally)

    def store_now(context: StepContext, record: Commit) -> Commit:
        outputs, waiting[:] = list(waiting), []
        committed = put_commit(context, record)
        for each in outputs:
            put_output(*each)
        return committed

    patch.setattr(StepContext, "put_output", postpone)
    patch.setattr(StepContext, "commit", store_now)


def output_of(context: StepContext, task: str, suffix: str, data: bytes, tally: Tally) -> Output:
    digest = sha256(data)
    key = f"{context.step}/{digest[:2]}/{task}-{digest[:16]}{suffix}"
    return Output(key, len(data), digest, tally.utterances, tally.duration_ms)


def key_without_digest(patch: Patch) -> None:
    """A shard's key holds the task's name alone."""

    def put(context: StepContext, task: str, suffix: str, data: bytes, tally: Tally) -> Output:
        key = f"{context.step}/{task}{suffix}"
        context.store.put(join_uri(context.run_uri, key), data)
        return Output(key, len(data), sha256(data), tally.utterances, tally.duration_ms)

    patch.setattr(StepContext, "put_output", put)


def manifest_of_any_recipe(patch: Patch) -> None:
    """A manifest counts as this step's, whatever its fingerprint."""

    def found(context: StepContext, *_: Any) -> Manifest | None:
        try:
            return engine.read_checked(
                context.store, manifest_uri(context.run_uri, context.step), Manifest.from_bytes
            )
        except engine.ObjectNotFound:
            return None

    patch.setattr(engine, "finished_manifest", found)


def commits_of_any_recipe(patch: Patch) -> None:
    """Commit records count as this step's, whatever their fingerprint."""

    def found(context: StepContext) -> dict[str, Commit]:
        listed = context.store.list(join_uri(context.run_uri, context.step, COMMITS_FOLDER))
        commits = [Commit.from_bytes(context.store.get(each.uri)) for each in listed]
        return {each.task: each for each in commits}

    patch.setattr(engine, "committed_tasks", found)


def second_commit_accepted(patch: Patch) -> None:
    """A second attempt takes the first one's record for its own, without comparing the two."""

    def put(context: StepContext, record: Commit) -> Commit:
        uri = context.commit_uri(record.task)
        if context.store.put_if_absent(uri, bytes_of(context, record)):
            return record
        return Commit.from_bytes(context.store.get(uri))

    patch.setattr(StepContext, "commit", put)


def commit_replaced(patch: Patch) -> None:
    """A second attempt's record replaces the first one's."""

    def put(context: StepContext, record: Commit) -> Commit:
        context.store.put(context.commit_uri(record.task), bytes_of(context, record))
        return record

    patch.setattr(StepContext, "commit", put)


def lost_answer_is_a_failure(patch: Patch) -> None:
    """A record that is there already is taken for another attempt's."""

    def put(context: StepContext, record: Commit) -> Commit:
        uri = context.commit_uri(record.task)
        if not context.store.put_if_absent(uri, bytes_of(context, record)):
            raise ValueError(f"task {record.task} was committed before")
        return record

    patch.setattr(StepContext, "commit", put)


def ledger_not_stored(patch: Patch) -> None:
    """A ledger is named, but not stored."""

    def name(context: StepContext, task: str, rows: Sequence[Quarantined]) -> Output:
        data = "".join(f"{row.to_json()}\n" for row in rows).encode()
        return output_of(context, task, ".ledger.jsonl", data, Tally.of(rows))

    patch.setattr(StepContext, "put_ledger", name)


def digest_of_records_ignored(patch: Patch) -> None:
    """Manifests and commit records are read without comparing their digest."""

    def read(data: bytes, remedy: str) -> dict[str, Any]:
        del remedy
        return {key: value for key, value in json.loads(data).items() if key != "sha256"}

    patch.setattr(sealed_json, "unseal", read)


def condition_left_out(patch: Patch) -> None:
    """The store writes conditionally without the condition."""

    def put(store: S3Store, uri: str, data: bytes) -> bool:
        store.put(uri, data)
        return True

    patch.setattr(S3Store, "put_if_absent", put)


def condition_left_out_of_retries(patch: Patch) -> None:
    """The store's conditional write is plain once the first attempt has failed."""
    put_if_absent = S3Store.put_if_absent

    def put(store: S3Store, uri: str, data: bytes) -> bool:
        with pytest.MonkeyPatch.context() as impatient:
            impatient.setattr("infra.store.s3.is_transient", lambda _: False)
            try:
                return put_if_absent(store, uri, data)
            except Exception:
                impatient.undo()
                store.put(uri, data)
                return True

    patch.setattr(S3Store, "put_if_absent", put)


def refusal_taken_for_success(patch: Patch) -> None:
    """The store reports an object as written though another one was there."""
    put_if_absent = ObjectStore.put_if_absent

    def put(store: ObjectStore, uri: str, data: bytes) -> bool:
        put_if_absent(store, uri, data)
        return True

    patch.setattr(ObjectStore, "put_if_absent", put)


MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    manifest_replaced,
    second_manifest_accepted,
    manifest_before_the_commits,
    commit_before_the_shards,
    key_without_digest,
    manifest_of_any_recipe,
    commits_of_any_recipe,
    second_commit_accepted,
    commit_replaced,
    lost_answer_is_a_failure,
    ledger_not_stored,
    digest_of_records_ignored,
    condition_left_out,
    condition_left_out_of_retries,
    refusal_taken_for_success,
)


def parts_not_stored(patch: Patch) -> None:
    """The manifest names parts that nobody stores."""
    put_parts = StepContext.put_parts

    def name(context: StepContext, *arguments: Any) -> OutputsInParts:
        with pytest.MonkeyPatch.context() as silent:
            silent.setattr(type(context.store), "put", lambda *_: None)
            return put_parts(context, *arguments)

    patch.setattr(StepContext, "put_parts", name)


def parts_after_the_manifest(patch: Patch) -> None:
    """The manifest is stored, and then its parts."""
    put, write = SimulatedStore.put, engine.write_manifest
    waiting: list[tuple[Any, ...]] = []

    def postpone(store: SimulatedStore, uri: str, data: bytes) -> None:
        if not uri.endswith(PART_SUFFIX):
            put(store, uri, data)
        else:
            waiting.append((store, uri, data))

    def write_first(context: StepContext, made: Manifest) -> None:
        parts, waiting[:] = list(waiting), []
        write(context, made)
        for each in parts:
            put(*each)

    patch.setattr(SimulatedStore, "put", postpone)
    patch.setattr(engine, "write_manifest", write_first)


def foreign_commits_folded(patch: Patch) -> None:
    """Commits of any recipe are folded."""
    patch.setattr(StepContext, "require_ours", lambda *_: None)


def folded_when_begun(patch: Patch) -> None:
    """The commits that were there when the step began are folded, and no others."""
    fold_earlier = engine._Driver._fold_earlier

    def only(driver: Any) -> Any:
        committed = fold_earlier(driver)
        driver.names = [name for name in driver.names if name in committed] or driver.names
        return committed

    patch.setattr(engine._Driver, "_fold_earlier", only)


MUTATIONS_OF_PARTS: tuple[Callable[[Patch], None], ...] = (
    parts_not_stored,
    parts_after_the_manifest,
    foreign_commits_folded,
    folded_when_begun,
)
