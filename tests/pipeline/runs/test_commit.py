"""Exactly-once commits: keys, records, second attempts, and what a restarted step runs."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectNotFound, ObjectStore
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import (
    Commit,
    StepContext,
    StepPlan,
    committed_tasks,
    fingerprint,
    finished_manifest,
    run_plan,
    step_context,
    write_manifest,
)
from pipeline.runs.ledger import LossBudgetExceededError
from pipeline.runs.manifest import Manifest, Output, read_manifest
from tests.small_corpus import serially

CONFIG, INPUTS = {"k": 20}, {"selection/x": "0123"}


@pytest.fixture
def context(tmp_path: Path) -> StepContext:
    return step_context(ObjectStore((str(tmp_path),)), str(tmp_path), "features/x", CONFIG, INPUTS)


def record(context: StepContext, task: str = "0") -> Commit:
    """A task of four utterances: two written, one quarantined, one not selected."""
    output = context.put_output(task, ".parquet", f"rows of {task}".encode(), Tally(2, 30))
    ledger = context.put_ledger(task, [Quarantined("u", "u.flac", "truncated", "", 9, 7)])
    return Commit(
        task,
        context.fingerprint,
        (output,),
        ledger,
        Tally(4, 42),
        quarantined=Tally(1, 7),
        unselected=Tally(1, 5),
        statistics={"sum": 0.5},
    )


def test_a_fingerprint_is_the_digest_of_configuration_and_inputs() -> None:
    """SHA-256 of canonical JSON, so the order of keys does not matter."""
    text = b'[{"k": 20, "m": 1}, {"selection/x": "0123"}]'
    assert fingerprint({"m": 1, "k": 20}, INPUTS) == hashlib.sha256(text).hexdigest()


def test_an_outputs_key_holds_its_digest(context: StepContext) -> None:
    """step/first two digits/task-first sixteen digits, whatever it holds."""
    digest = hashlib.sha256(b"rows").hexdigest()
    output = context.put_output("000007", ".parquet", b"rows", Tally(2, 30))
    key = f"features/x/{digest[:2]}/000007-{digest[:16]}.parquet"
    assert output == Output(key, 4, digest, 2, 30)
    assert context.store.get(f"{context.run_uri}/{key}") == b"rows"


def test_a_ledger_has_one_line_an_utterance(context: StepContext) -> None:
    """It counts what it holds; without any there is no ledger."""
    rows = [Quarantined(f"u{number}", "", "truncated", "", 9, 7) for number in range(3)]
    ledger = context.put_ledger("0", rows)
    assert ledger is not None
    assert ledger.key.endswith(".ledger.jsonl")
    assert ledger.tally == Tally(3, 21)
    lines = context.store.get(f"{context.run_uri}/{ledger.key}").decode().splitlines()
    assert [json.loads(line)["utterance_id"] for line in lines] == ["u0", "u1", "u2"]
    assert context.put_ledger("0", []) is None


def test_a_record_comes_back_as_it_was(context: StepContext) -> None:
    """With a ledger and without one."""
    for committed in (record(context), replace(record(context), ledger=None)):
        assert Commit.from_bytes(committed.to_bytes()) == committed
        assert committed.tally_out == Tally(2, 30)


def test_a_record_lies_below_its_step(context: StepContext) -> None:
    """One object a task, which a restarted step finds."""
    committed = context.commit(record(context, "000007"))
    data = context.store.get(f"{context.run_uri}/features/x/commits/000007.json")
    assert Commit.from_bytes(data) == committed
    assert committed_tasks(context) == {"000007": committed}


def test_a_second_attempt_must_have_made_the_same(context: StepContext) -> None:
    """The first record stays; another one is an error that names it."""
    first = context.commit(record(context))
    assert context.commit(record(context)) == first
    uri = f"{context.run_uri}/features/x/commits/0.json"
    with pytest.raises(ValueError, match=f"{uri} holds other digests than this attempt made"):
        context.commit(replace(record(context), tally_in=Tally(5, 42)))
    assert committed_tasks(context) == {"0": first}


def test_another_recipes_commits_are_refused(context: StepContext) -> None:
    """The error names the step and the task."""
    context.commit(record(context, "000007"))
    other = replace(context, fingerprint="another")
    refused = "features/x: task 000007 was committed under another recipe.* or remove features/x"
    with pytest.raises(ValueError, match=refused):
        committed_tasks(other)


def test_a_commit_that_vanishes_while_it_is_read_is_an_error(context: StepContext) -> None:
    """A store that lists what it does not have is not a step without commits."""
    context.commit(record(context))

    class Forgetful(ObjectStore):
        def get_many(self, uris: Sequence[str], *_: int) -> Any:
            for uri in uris:
                self.delete(uri)
            return super().get_many(uris)

    store = Forgetful(context.store.allowed_prefixes)
    with pytest.raises(ObjectNotFound):
        committed_tasks(replace(context, store=store))


def test_a_step_is_finished_once_its_manifest_is_there(context: StepContext) -> None:
    """None before; afterwards the manifest, if configuration and inputs are the same."""
    assert finished_manifest(context) is None
    manifest = Manifest("features/x", CONFIG, INPUTS, ())
    write_manifest(context, manifest)
    assert finished_manifest(context) == manifest
    other = step_context(context.store, context.run_uri, "features/x", {"k": 21}, INPUTS)
    digests = rf"\(digest {context.fingerprint[:12]}, now {other.fingerprint[:12]}\)"
    uri = f"{context.run_uri}/features/x/manifest.json"
    with pytest.raises(ValueError, match=f"{uri} was made from another recipe.*{digests}.*x$"):
        finished_manifest(other)


def plan_of(context: StepContext, names: Sequence[str], loss_budget: float = 1.0) -> StepPlan[str]:
    return StepPlan(context, CONFIG, INPUTS, {name: name for name in names}, loss_budget)


def by_number(outputs: list[Output]) -> list[Output]:
    return sorted(outputs, key=lambda output: output.key.rpartition("/")[2])


def test_a_restarted_step_runs_what_is_not_committed(context: StepContext) -> None:
    """The manifest is that of one run without a break: tasks in the plan's order."""
    earlier = [context.commit(record(context, name)) for name in ("1", "3")]
    ran: list[str] = []

    def commit(name: str) -> Commit:
        ran.append(name)
        return context.commit(record(context, name))

    def backwards(tasks: Sequence[str], function: Callable[[str], Any], description: str) -> Any:
        assert description == "features/x"
        return serially(list(reversed(tasks)), function, description)

    manifest = run_plan(plan_of(context, "0123"), commit, backwards, by_number)
    assert ran == ["2", "0"]
    names = [key.rpartition("/")[2][0] for key in (each.key for each in manifest.outputs)]
    assert names == ["0", "1", "2", "3"]
    assert manifest.ledgers[1] == earlier[0].ledger
    assert [ledger.key.rpartition("/")[2][0] for ledger in manifest.ledgers] == list("0123")
    assert manifest.tally_in == Tally(16, 168)
    assert (manifest.tally_out, manifest.quarantined) == (Tally(8, 120), Tally(4, 28))
    assert manifest.unselected == Tally(4, 20)
    assert (manifest.config, manifest.inputs, manifest.statistics) == (CONFIG, INPUTS, {})
    assert read_manifest(context.store, context.run_uri, "features/x") == manifest
    assert finished_manifest(context) == manifest


def test_statistics_are_of_all_commits_in_the_plans_order(context: StepContext) -> None:
    """Those of earlier attempts among them; a task without quarantine has no ledger."""
    context.commit(replace(record(context, "1"), ledger=None))
    manifest = run_plan(
        plan_of(context, "01"),
        lambda name: context.commit(record(context, name)),
        serially,
        by_number,
        lambda commits: {"tasks": [commit.task for commit in commits]},
    )
    assert manifest.statistics == {"tasks": ["0", "1"]}
    assert [ledger.key.rpartition("/")[2][0] for ledger in manifest.ledgers] == ["0"]


def test_beyond_the_loss_budget_there_is_no_manifest(context: StepContext) -> None:
    """The commits stay, and a larger budget needs no task again."""

    def commit(name: str) -> Commit:
        return context.commit(record(context, name))

    with pytest.raises(LossBudgetExceededError, match="2 of 8 utterances quarantined"):
        run_plan(plan_of(context, "01", loss_budget=0.24), commit, serially, by_number)
    assert finished_manifest(context) is None
    larger = plan_of(context, "01", loss_budget=0.25)
    assert run_plan(larger, pytest.fail, serially, by_number).quarantined == Tally(2, 14)
