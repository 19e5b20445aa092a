"""Merge by ranges of hashes what many tasks wrote: each task cuts its own, others join a range."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.outputs import Output
from pipeline.runs.step import Distribute, commit_each


@runtime_checkable
class NamedTask(Protocol):
    """NamedTask has the name of its commit."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...


G = TypeVar("G", bound=NamedTask)
M = TypeVar("M", bound=NamedTask)


def cut_and_merge(
    committed: Mapping[str, Commit],
    gathers: Iterable[G],
    gather: Callable[[G], Commit],
    num_ranges: int,
    merge_of: Callable[[int, tuple[Output, ...]], M],
    merge: Callable[[M], Commit],
    distribute: Distribute,
    described: tuple[str, str],
) -> tuple[Output, ...]:
    """Gather, then merge; return what the merges wrote, in the order of ranges.

    Each gathering task writes one object a range, if there are such tasks. `merge_of` makes the
    task of a range from its number and what all have written of it. Tasks that are `committed` are
    not repeated.
    """
    gathered = run_named(committed, list(gathers), gather, distribute, described[0])
    merges = [
        merge_of(number, tuple(commit.outputs[number] for commit in gathered))
        for number in range(num_ranges)
    ]
    merged = run_named(committed, merges, merge, distribute, described[1])
    return tuple(output for commit in merged for output in commit.outputs)


def run_named(
    committed: Mapping[str, Commit],
    tasks: Sequence[G],
    run_task: Callable[[G], Commit],
    distribute: Distribute,
    description: str,
) -> list[Commit]:
    """Run the tasks that are not `committed`; return all commits in the tasks' order."""
    by_name = {each.name: each for each in tasks}
    return commit_each(committed, by_name, run_task, distribute, description)


def commit_ranges(context: StepContext, name: str, ranges: Iterable[bytes], suffix: str) -> Commit:
    """Store a task's ranges by number, and commit them: objects without utterances of their own."""
    outputs = (
        context.put_output(f"{name}-{number:05d}", suffix, data, Tally())
        for number, data in enumerate(ranges)
    )
    return commit_objects(context, name, outputs)


def commit_objects(context: StepContext, name: str, outputs: Iterable[Output]) -> Commit:
    """Commit objects without utterances of their own."""
    return context.commit(
        Commit(name, context.fingerprint, tuple(outputs), None, Tally(), quarantined=Tally())
    )
