"""A step's context and the commit of one of its tasks, for tests of commits and of steps."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pipeline.records import Quarantined, Tally
from pipeline.runs import commit, engine
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.engine import StepResult, StepSpec, TaskPlan, run_step, run_tasks

CONFIG, INPUTS = {"k": 20}, {"selection/x": "0123"}


def spec_of(context: StepContext, config: Mapping[str, Any] = CONFIG) -> StepSpec:
    """Describe the step of a context, under a configuration."""
    return StepSpec(context.store, context.run_uri, context.step, config, digests=INPUTS)


def run_plan(
    context: StepContext,
    plan_of: Callable[[StepContext], TaskPlan],
    config: Mapping[str, Any] = CONFIG,
) -> StepResult:
    """Run a step of the tasks that `plan_of` makes for its context."""
    return run_step(spec_of(context, config), lambda step: run_tasks(step, plan_of(step.context)))


def set_small_bounds(patch: pytest.MonkeyPatch, max_listed: int = 3) -> None:
    """Begin waves, groups of commits and parts of manifests at a few tasks."""
    for name, value in (
        ("MAX_HELD", 1),
        ("WAVE_TASKS", 4),
        ("GROUP_COMMITS", 2),
        ("GROUPS_AT_A_TIME", 2),
    ):
        patch.setattr(engine, name, value)
    for module in (engine, commit):
        patch.setattr(module, "MAX_LISTED", max_listed)


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
