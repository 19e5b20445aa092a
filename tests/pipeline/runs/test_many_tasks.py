"""A step of many tasks makes what a small one makes, and its driver reads no commit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, StepContext, committed_tasks, once, step_context
from pipeline.runs.engine import (
    Distribute,
    Loss,
    LossBudgetExceededError,
    NumberedTasks,
    Statistics,
    TaskPlan,
)
from pipeline.runs.manifest import Manifest, OutputsInParts, manifest_uri, read_manifest
from pipeline.shuffling import shuffle
from tests.pipeline.runs.small_commits import CONFIG, INPUTS, run_plan, set_small_bounds
from tests.small_corpus import killed_at, serially

NUM_TASKS = 11


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin waves, groups and parts at a few tasks."""
    set_small_bounds(monkeypatch)


@dataclass(frozen=True)
class CountedTask:
    """A task of four utterances with two outputs; odd ones lose an utterance."""

    context: StepContext
    name: str
    number: int
    ran: list[str]


@once
def work(task: CountedTask) -> Commit | Loss:
    task.ran.append(task.name)
    lost = [Quarantined(f"u{task.number}", "", "truncated", "", 9, 7)] * (task.number % 2)
    outputs = tuple(
        task.context.put_output(f"{task.name}-{n}", ".parquet", f"{task.name}{n}".encode(), tally)
        for n, tally in enumerate((Tally(1, 10), Tally(3 - len(lost), 30)))
    )
    quarantined = Tally.of(lost)
    return task.context.commit(
        Commit(
            task.name,
            task.context.fingerprint,
            outputs,
            task.context.put_ledger(task.name, lost),
            quarantined + Tally(4 - len(lost), 40),
            quarantined=quarantined,
            statistics={"numbers": [task.number]},
        )
    )


def numbers(tasks: Sequence[Statistics]) -> Statistics:
    return {"numbers": [each for statistics in tasks for each in statistics["numbers"]]}


def ordered(outputs: Sequence[Any]) -> list[Any]:
    return shuffle(outputs, 5)


def run(
    context: StepContext,
    distribute: Distribute = serially,
    ran: list[str] | None = None,
    config: Any = CONFIG,
    loss_budget: float = 1.0,
) -> Manifest:
    """Run the step's tasks, and return its manifest."""
    names = [] if ran is None else ran

    def plan_of(own: StepContext) -> TaskPlan:
        def task(name: str, number: int) -> CountedTask:
            return CountedTask(own, name, number, names)

        return TaskPlan(
            NumberedTasks(range(NUM_TASKS), task),
            work,
            distribute,
            loss_budget,
            fold=numbers,
            order=ordered,
            num_utterances=4 * NUM_TASKS,
        )

    return run_plan(context, plan_of, config).manifest


def elsewhere(context: StepContext, folder: Path) -> StepContext:
    store = ObjectStore((str(folder),))
    return step_context(store, str(folder), context.step, CONFIG, INPUTS)


def test_folded_commits_make_the_manifest_of_a_small_step(
    context: StepContext, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> None:
    """Outputs, ledgers, tallies and statistics are equal; the long lists lie in parts."""
    small = run(context)
    assert isinstance(small.outputs, tuple)
    assert small.statistics == {"numbers": [*range(NUM_TASKS)]}
    request.getfixturevalue("small_bounds")
    large = elsewhere(context, tmp_path_factory.mktemp("large"))
    made = run(large)
    assert isinstance(made.outputs, OutputsInParts)
    assert [part.num_outputs for part in made.outputs.parts] == [3] * 7 + [1]
    assert len(made.ledgers) == 5
    read = read_manifest(large.store, large.run_uri, large.step)
    assert read == made
    as_small = replace(read, outputs=tuple(read.outputs), ledgers=tuple(read.ledgers))
    assert as_small.to_bytes() == small.to_bytes()


@pytest.mark.usefixtures("small_bounds")
def test_outputs_in_parts_are_a_sequence(context: StepContext) -> None:
    """Places, slices and iteration are those of a tuple."""
    outputs = run(context).outputs
    plain = tuple(outputs)
    assert len(plain) == len(outputs) == 2 * NUM_TASKS
    assert [outputs[place] for place in range(-22, 22)] == [*plain, *plain]
    assert outputs[5:17:3] == plain[5:17:3]
    assert outputs[1:3] == plain[1:3]
    with pytest.raises(IndexError):
        outputs[22]


@pytest.mark.parametrize("kills_at", [1, 8, 17])
@pytest.mark.usefixtures("small_bounds")
def test_a_killed_driver_resumes_to_the_same_bytes(
    context: StepContext, kills_at: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed in a wave, between waves or while commits are folded; no task is done twice."""
    undisturbed = elsewhere(context, tmp_path_factory.mktemp("undisturbed"))
    run(undisturbed)
    ran: list[str] = []
    # Eleven tasks and six groups: at the 17th call the last group is folded.
    with pytest.raises(KeyboardInterrupt):
        run(context, killed_at(kills_at), ran)
    assert run(context, serially, ran).outputs
    assert sorted(ran) == [f"{number:06d}" for number in range(NUM_TASKS)]
    for key in (f"{context.step}/manifest.json", *parts_of(context)):
        uris = (join_uri(each.run_uri, key) for each in (context, undisturbed))
        ours, theirs = (context.store, undisturbed.store)
        assert ours.get(next(uris)) == theirs.get(next(uris))


def parts_of(context: StepContext) -> list[str]:
    manifest = read_manifest(context.store, context.run_uri, context.step)
    lists = (manifest.outputs, manifest.ledgers)
    return [part.key for each in lists if isinstance(each, OutputsInParts) for part in each.parts]


@pytest.mark.usefixtures("small_bounds")
def test_a_driver_receives_no_commit(context: StepContext) -> None:
    """Tasks return their losses, and the driver has no list of all commits."""
    results: list[Any] = []

    def seen(elements: Sequence[Any], function: Callable[[Any], Any], name: str) -> list[Any]:
        results.extend(found := serially(elements, function, name))
        return found

    run(context, seen)
    assert {type(each).__name__ for each in results} == {"Loss", "_Fold"}
    assert len(results) == NUM_TASKS + 6


@pytest.mark.usefixtures("small_bounds")
def test_another_recipe_is_refused_before_any_task_runs(context: StepContext) -> None:
    """The groups of what is committed are folded first."""
    with pytest.raises(KeyboardInterrupt):
        run(context, interrupted_after(2))
    ran: list[str] = []
    with pytest.raises(ValueError, match=r"task 00000\d was committed under another recipe"):
        run(context, serially, ran, config={"k": 21})
    assert ran == []


def interrupted_after(number: int) -> Distribute:
    def distribute(
        elements: Sequence[Any], function: Callable[[Any], Any], description: str
    ) -> list[Any]:
        serially(elements[:number], function, description)
        raise KeyboardInterrupt

    return distribute


@pytest.mark.usefixtures("small_bounds")
def test_the_loss_budget_ends_a_wave_and_a_resumed_step(context: StepContext) -> None:
    """Two of 44 may be lost: the third loss is in the second wave; again, no task runs."""
    ran: list[str] = []
    found = r"3 of 44 utterances quarantined.*'truncated': 3.*See the ledgers, such as features/x/"
    with pytest.raises(LossBudgetExceededError, match=found):
        run(context, serially, ran, loss_budget=0.05)
    assert ran == [f"{number:06d}" for number in range(6)]
    with pytest.raises(LossBudgetExceededError, match=found):
        run(context, serially, ran, loss_budget=0.05)
    assert len(ran) == 6
    assert run(context, serially, ran, loss_budget=0.2).quarantined == Tally(5, 35)
    assert len(committed_tasks(context)) == NUM_TASKS


@pytest.mark.usefixtures("small_bounds")
def test_a_damaged_part_is_named(context: StepContext) -> None:
    """With the remedy, which works: the manifest is made again from the commits."""
    outputs = run(context).outputs
    assert isinstance(outputs, OutputsInParts)
    uri = join_uri(context.run_uri, outputs.parts[1].key)
    whole = context.store.get(uri)
    for damage in (lambda: context.store.put(uri, whole[:-1]), lambda: context.store.delete(uri)):
        damage()
        found = read_manifest(context.store, context.run_uri, context.step).outputs
        assert found[0] == outputs[0]
        with pytest.raises(ValueError, match=rf"{uri}.*remove the step's manifest.json and run"):
            found[3]
    context.store.delete(manifest_uri(context.run_uri, context.step))
    assert tuple(run(context).outputs) == tuple(outputs)


@pytest.mark.usefixtures("small_bounds")
def test_a_commit_under_another_name_is_refused(context: StepContext) -> None:
    """It would count one task twice."""
    with pytest.raises(KeyboardInterrupt):
        run(context, interrupted_after(1))
    record = context.store.get(context.commit_uri("000000"))
    context.store.put(context.commit_uri("000001"), record)
    with pytest.raises(ValueError, match=r"commits/000001.json is the commit of task 000000"):
        run(context)
