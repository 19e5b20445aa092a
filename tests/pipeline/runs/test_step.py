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
    StepRun,
    StepSpec,
    TaskPlan,
    finished_manifest,
    run_step,
    run_tasks,
    write_manifest,
)
from pipeline.runs.manifest import Manifest, read_manifest, store_again
from tests.pipeline.runs.small_commits import CONFIG, INPUTS, record, run_plan, spec_of
from tests.small_corpus import serially


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
) -> Manifest:
    """The manifest of a step of these tasks, whose outputs are in the opposite order."""
    plan = TaskPlan({name: name for name in names}, commit, distribute, 1.0, order=reversed_order)
    return run_plan(context, lambda _: plan).manifest


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
    spec = spec_of(context)

    def writer() -> None:
        run_step(spec, lambda step: step.lossless(Tally(2, 30)))

    result = run_step(spec, lambda _: None, barrier=writer)
    assert result.manifest.tally_out == Tally(2, 30)
    assert not result.was_finished


def test_another_result_of_the_same_recipe_is_refused(context: StepContext) -> None:
    """As of a training that two drivers began; the same command then finds the first result."""
    spec = spec_of(context)

    def overtaken(step: StepRun) -> Manifest:
        run_step(spec, lambda step: step.lossless(Tally(3, 40)))
        return step.lossless(Tally(2, 30))

    with pytest.raises(ValueError, match="another driver finished this step first, and its result"):
        run_step(spec, overtaken)
    assert run_step(spec, pytest.fail).manifest.tally_out == Tally(3, 40)


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
