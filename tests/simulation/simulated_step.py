"""The real code of a step with a few tasks, as the drivers of a simulation run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from pipeline.records import Quarantined, Tally
from pipeline.runs import commit, engine
from pipeline.runs.commit import Commit, Repetition, StepContext, once
from pipeline.runs.engine import StepResult, StepRun, StepSpec, TaskPlan, run_step, run_tasks
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import features_step
from tests.simulation.replayed_code import Call, ask
from tests.simulation.simulated_s3 import BUCKET, SimulatedStore

RUN = f"s3://{BUCKET}/run"
STEP = features_step("labelled")
SCORES_SUFFIX = ".json"
COMMITS, MANIFEST_KEY = f"run/{STEP}/commits/", f"run/{STEP}/manifest.json"


class Recipe(NamedTuple):
    """Recipe holds a setting, and the device whose last bits are in what tasks make, if any."""

    k: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class SmallTask:
    """A task of four utterances: two are written, one is quarantined, one is not selected."""

    context: StepContext
    name: str
    recipe: Recipe


@once
def write_shard(task: SmallTask) -> Commit:
    """Store a shard and a ledger, as the tasks of real steps do, and commit them."""
    rows = f"rows of {task.name} by {task.recipe}".encode()
    output = task.context.put_output(task.name, ".parquet", rows, Tally(2, 30))
    quarantined = Quarantined(f"u{task.name}", "u.flac", "truncated", "", 9, 7)
    return task.context.commit(
        Commit(
            task=task.name,
            fingerprint=task.context.fingerprint,
            outputs=(output,),
            ledger=task.context.put_ledger(task.name, [quarantined]),
            tally_in=Tally(4, 42),
            quarantined=Tally(1, 7),
            unselected=Tally(1, 5),
        )
    )


def small_step(recipe: Recipe, num_tasks: int) -> StepResult:
    """Run the step of a recipe on the simulated store and cluster.

    A step of no tasks stores one object in the driver, as training and evaluation do.
    """

    def make(step: StepRun) -> Manifest:
        if not num_tasks:
            data = f"scores of {recipe}".encode()
            output = step.context.put_output("scores", SCORES_SUFFIX, data, Tally(4, 42))
            return step.lossless(Tally(4, 42), (output,))
        names = [f"{number:06d}" for number in range(num_tasks)]
        tasks = {name: SmallTask(step.context, name, recipe) for name in names}
        plan = TaskPlan(tasks, write_shard, simulated_cluster, 1.0)
        return run_tasks(step, plan)

    repetition = Repetition.OTHER_LAST_BITS if recipe.device else Repetition.SAME_BYTES
    spec = StepSpec(
        store=SimulatedStore((RUN,)),
        run_uri=RUN,
        step=STEP,
        config={"k": recipe.k},
        digests={"selection": "0123"},
        repetition=repetition,
    )
    return run_step(spec, make)


def simulated_cluster(
    elements: Sequence[Any], function: Callable[[Any], Any], description: str
) -> list[Any]:
    """Stand for Spark: the driver waits until the simulation has run a task for each element."""
    return ask(Call("tasks", f"{description} {list(elements)}", (function, *elements)))


def set_bounds_of_two_tasks(patch: pytest.MonkeyPatch) -> None:
    """Let two tasks be many: one group of commits, and a part of a manifest for each output."""
    for name, value in (("MAX_HELD", 1), ("WAVE_TASKS", 2), ("GROUP_COMMITS", 2)):
        patch.setattr(engine, name, value)
    for module in (engine, commit):
        patch.setattr(module, "MAX_LISTED", 1)
