"""What a selection keeps for itself until it has its manifest, below `scratch/` in its folder.

The manifest does not name it: after that it may be removed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from pipeline.runs.commit import Commit, Distribute, StepContext
from pipeline.runs.names import SCRATCH_FOLDER

T = TypeVar("T")


def scratch(context: StepContext) -> StepContext:
    """Where a selection's tasks write what only it needs."""
    return replace(context, step=f"{context.step}/{SCRATCH_FOLDER}")


def commit_each(
    committed: Mapping[str, Commit],
    tasks: Mapping[str, T],
    function: Callable[[T], Commit],
    distribute: Distribute,
    description: str,
) -> list[Commit]:
    """Run the tasks that are not among the `committed`; the commits of all, in their order."""
    pending = [task for name, task in tasks.items() if name not in committed]
    fresh = {commit.task: commit for commit in distribute(pending, function, description)}
    return [fresh.get(name) or committed[name] for name in tasks]
