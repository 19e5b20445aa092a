"""A step's context and the commit of one of its tasks, for tests of commits and of steps."""

from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined, Tally
from pipeline.runs import commit, engine
from pipeline.runs.commit import Commit, StepContext, step_context

CONFIG, INPUTS = {"k": 20}, {"selection/x": "0123"}


@pytest.fixture
def context(tmp_path: Path) -> StepContext:
    return step_context(ObjectStore((str(tmp_path),)), str(tmp_path), "features/x", CONFIG, INPUTS)


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
