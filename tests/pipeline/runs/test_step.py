"""Steps of a run: finished ones are found, restarted ones run what is not committed."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore
from infra.task_metrics import REQUESTS
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, step_context
from pipeline.runs.engine import (
    Distribute,
    LossBudgetExceededError,
    Statistics,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    finished_manifest,
    no_statistics,
    run_step,
    run_tasks,
    write_manifest,
)
from pipeline.runs.manifest import Manifest, read_manifest, store_again
from tests.pipeline.runs.small_commits import CONFIG, INPUTS, context, record
from tests.small_corpus import serially

__all__ = ["context"]


def test_a_step_is_finished_once_its_manifest_is_there(context: StepContext) -> None:
    """None before; afterwards the manifest, if configuration and inputs are the same."""
    assert finished_manifest(context, CONFIG, INPUTS) is None
    manifest = Manifest("features/x", CONFIG, INPUTS, ())
    write_manifest(context, manifest)
    assert finished_manifest(context, CONFIG, INPUTS) == manifest
    other = step_context(context.store, context.run_uri, "features/x", {"k": 21}, INPUTS)
    uri = f"{context.run_uri}/features/x/manifest.json"
    with pytest.raises(
        ValueError, match=f"{uri} was made from another recipe or other inputs: k: 20 -> 21: .*x$"
    ):
        finished_manifest(other, {"k": 21}, INPUTS)


def run(
    context: StepContext,
    names: Sequence[str],
    commit: Callable[[str], Commit],
    distribute: Distribute = serially,
    loss_budget: float = 1.0,
    fold: Callable[[Sequence[Statistics]], Statistics] = no_statistics,
) -> Manifest:
    """The manifest of a step of these tasks, whose outputs are in the opposite order."""
    plan = TaskPlan(
        {name: name for name in names}, commit, distribute, loss_budget, fold, order=reversed_order
    )
    spec = StepSpec(context.store, context.run_uri, context.step, CONFIG, digests=INPUTS)
    result = run_step(spec, lambda step: run_tasks(step, plan))
    assert not result.was_finished
    return result.manifest


def reversed_order(numbers: Sequence[Any]) -> list[Any]:
    return list(reversed(numbers))


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

    manifest = run(context, "0123", commit, backwards)
    assert ran == ["2", "0"]
    names = [key.rpartition("/")[2][0] for key in (each.key for each in manifest.outputs)]
    assert names == ["3", "2", "1", "0"]
    assert manifest.ledgers[1] == earlier[0].ledger
    assert [ledger.key.rpartition("/")[2][0] for ledger in manifest.ledgers] == list("0123")
    assert manifest.tally_in == Tally(16, 168)
    assert (manifest.tally_out, manifest.quarantined) == (Tally(8, 120), Tally(4, 28))
    assert manifest.unselected == Tally(4, 20)
    assert (manifest.config, manifest.inputs, manifest.statistics) == (CONFIG, INPUTS, {})
    assert read_manifest(context.store, context.run_uri, "features/x") == manifest
    assert finished_manifest(context, CONFIG, INPUTS) == manifest


def test_statistics_are_of_all_commits_in_the_plans_order(context: StepContext) -> None:
    """Those of earlier attempts among them; a task without quarantine has no ledger."""

    def commit(name: str) -> Commit:
        return context.commit(replace(record(context, name), statistics={"tasks": [name]}))

    context.commit(replace(record(context, "1"), ledger=None, statistics={"tasks": ["1"]}))
    manifest = run(context, "01", commit, fold=joined)
    assert manifest.statistics == {"tasks": ["0", "1"]}
    assert [ledger.key.rpartition("/")[2][0] for ledger in manifest.ledgers] == ["0"]


def joined(tasks: Sequence[Statistics]) -> Statistics:
    return {"tasks": [name for statistics in tasks for name in statistics["tasks"]]}


def test_beyond_the_loss_budget_there_is_no_manifest(context: StepContext) -> None:
    """The commits stay, and a larger budget needs no task again."""

    def commit(name: str) -> Commit:
        return context.commit(record(context, name))

    with pytest.raises(LossBudgetExceededError, match="2 of 8 utterances quarantined"):
        run(context, "01", commit, loss_budget=0.24)
    assert finished_manifest(context, CONFIG, INPUTS) is None
    manifest = run(context, "01", pytest.fail, loss_budget=0.25)
    assert manifest.quarantined == Tally(2, 14)


def test_a_finished_step_is_found(context: StepContext) -> None:
    """Nothing is made again, and the result says so."""
    first = run(context, "01", lambda name: context.commit(record(context, name)))
    spec = StepSpec(context.store, context.run_uri, context.step, CONFIG, digests=INPUTS)
    assert run_step(spec, pytest.fail) == StepResult(first, was_finished=True)


def test_inputs_are_manifests_of_steps_and_digests_of_other_things(context: StepContext) -> None:
    """A step's input is the SHA-256 of its manifest as stored; statistics are stored as made."""
    first = run(context, "01", lambda name: context.commit(record(context, name)))
    spec = StepSpec(
        context.store, context.run_uri, "later", {}, ["features/x"], {"lexicon.txt": "4567"}
    )
    words = {"words": 7}
    made = run_step(spec, lambda step: step.lossless(Tally(2, 30), statistics=words))
    manifest = made.manifest
    digest = hashlib.sha256(first.to_bytes()).hexdigest()
    assert manifest.inputs == {"features/x": digest, "lexicon.txt": "4567"}
    assert (manifest.tally_in, manifest.tally_out) == (Tally(2, 30), Tally(2, 30))
    assert manifest.statistics == {"words": 7}


def test_one_rank_writes_the_manifest_that_the_others_read(context: StepContext) -> None:
    """A rank without contents reads after the barrier, which the writer passes last."""
    spec = StepSpec(context.store, context.run_uri, context.step, CONFIG, digests=INPUTS)

    def writer() -> None:
        run_step(spec, lambda step: step.lossless(Tally(2, 30)))

    result = run_step(spec, lambda _: None, barrier=writer)
    assert result.manifest.tally_out == Tally(2, 30)
    assert not result.was_finished


def test_the_first_of_two_recipes_manifests_stays(context: StepContext) -> None:
    """The driver that finishes last fails, and names the setting in which the recipes differ."""
    slow, quick = (
        StepSpec(context.store, context.run_uri, context.step, {"k": k}, digests=INPUTS)
        for k in (20, 21)
    )

    def overtaken(step: StepRun) -> Manifest:
        run_step(quick, lambda step: step.lossless(Tally(3, 40)))
        return step.lossless(Tally(2, 30))

    with pytest.raises(ValueError, match=r"made from another recipe.*: k: 21 -> 20: use"):
        run_step(slow, overtaken)
    assert read_manifest(context.store, context.run_uri, context.step).config == {"k": 21}


def test_another_result_of_the_same_recipe_is_refused(context: StepContext) -> None:
    """As of a training that two drivers began; the same command then finds the first result."""
    spec = StepSpec(context.store, context.run_uri, context.step, CONFIG, digests=INPUTS)

    def overtaken(step: StepRun) -> Manifest:
        run_step(spec, lambda step: step.lossless(Tally(3, 40)))
        return step.lossless(Tally(2, 30))

    with pytest.raises(ValueError, match="another driver finished this step first, and its result"):
        run_step(spec, overtaken)
    assert run_step(spec, pytest.fail).manifest.tally_out == Tally(3, 40)


def test_a_manifest_whose_answer_was_lost_is_ours(context: StepContext) -> None:
    """The repeated write finds an object; equal bytes are no other driver's."""

    class Deaf(ObjectStore):
        def put_if_absent(self, uri: str, data: bytes) -> bool:
            assert super().put_if_absent(uri, data)
            return super().put_if_absent(uri, data)

    store = Deaf(context.store.allowed_prefixes)
    spec = StepSpec(store, context.run_uri, context.step, CONFIG, digests=INPUTS)
    result = run_step(spec, lambda step: step.lossless(Tally(2, 30)))
    assert result.manifest == read_manifest(store, context.run_uri, context.step)


def test_differing_settings_are_named_in_short(context: StepContext) -> None:
    """Nested ones by dotted names, absent ones as absent, long values cut, five at most."""
    made = {"filters": {"locales": ["en-GB"]}, "hours": 1.0, **{f"x{n}": 0 for n in range(5)}}
    write_manifest(
        replace(context, fingerprint="of another recipe"),
        Manifest(context.step, made, {"selection/x": "0" * 64}, ()),
    )
    named = (
        r": filters.locales: \[\"en-GB\"\] -> \[\]; filters.seed: absent -> 7; "
        r"selection/x: 0{24} -> 1{24}; "
        r"x0: 0 -> absent; x1: 0 -> absent; and 3 more: use another"
    )
    now = {"filters": {"locales": [], "seed": 7}, "hours": 1.0}
    with pytest.raises(ValueError, match=named):
        finished_manifest(context, now, {"selection/x": "1" * 64})


def test_what_is_there_already_is_not_stored_again(tmp_path: Path) -> None:
    """An absent object and other bytes are stored; equal bytes cause no PUT."""
    store, uri = ObjectStore((str(tmp_path),)), str(tmp_path / "certificate.json")
    puts = []
    for data in (b"one", b"one", b"two", b"two"):
        before = REQUESTS.total()
        store_again(store, uri, data)
        puts.append((REQUESTS.total() - before).put)
        assert store.get(uri) == data
    assert puts == [1, 0, 1, 0]


def test_the_longest_tasks_start_first_and_change_no_byte(context: StepContext) -> None:
    """Tasks of equal size keep their order, and so does the manifest; the bytes are the same."""
    sizes = {"0": 1.0, "1": 3.0, "2": 1.0, "3": 2.0}
    started: list[str] = []

    def commit(name: str) -> Commit:
        started.append(name)
        return context.commit(record(context, name))

    plan = TaskPlan({name: name for name in sizes}, commit, serially, 1.0, size=sizes.__getitem__)
    step = StepRun(context, CONFIG, INPUTS, base=None)
    made = run_tasks(step, plan)
    assert started == ["1", "3", "0", "2"]
    in_order = run_tasks(step, replace(plan, size=lambda _: 0.0))
    assert started == ["1", "3", "0", "2"], "all were committed"
    assert made == in_order
    assert [ledger.key.rpartition("/")[2][0] for ledger in made.ledgers] == list("0123")
