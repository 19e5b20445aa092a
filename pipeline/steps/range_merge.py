"""Merge by ranges of hashes what many tasks wrote: each task cuts its own, others join a range.

A gathering task stores one object with an extent for each range, so that objects, PUTs and what the
driver holds grow with the tasks, and not with their product with the ranges.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from infra.prefetch import prefetch
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.outputs import MAX_LISTED, Output, Outputs
from pipeline.runs.step import Distribute, commit_each
from pipeline.steps.extents import ExtentPlace, join_extents

MAX_CARRIED = 4_000
"""The tasks of a pass carry so many names of objects together, 0.7 MB. A longer list is stored, and
each task reads it: 150 tasks with 10,000 names each would take 250 MB in the driver's JVM."""

_GETS_IN_FLIGHT = 16


@runtime_checkable
class NamedTask(Protocol):
    """NamedTask has the name of its commit."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...


G = TypeVar("G", bound=NamedTask)
M = TypeVar("M", bound=NamedTask)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Gathered names the objects that tasks stored for others, each with an extent for any reader.

    It travels to all readers.
    """

    context: StepContext
    objects: Outputs
    num_extents: int

    @classmethod
    def of(cls, context: StepContext, objects: Sequence[Output], num_extents: int) -> "Gathered":
        """Name the objects to as many readers as each has extents; a long list is stored."""
        if not num_list_parts(len(objects), num_extents):
            return cls(context, tuple(objects), num_extents)
        listed = context.put_parts("gathered", (output.to_line() for output in objects))
        return cls(context, listed, num_extents)

    def read(self, number: int) -> Iterator[bytes]:
        """Yield extent `number` of each object, in the objects' order."""
        found = prefetch(partial(self._read_of, number), self.objects, _GETS_IN_FLIGHT)
        return (data for _, data in found)

    def _read_of(self, number: int, output: Output) -> bytes:
        uri = output.uri(self.context.run_uri)
        place = ExtentPlace(uri, output.num_bytes, number, self.num_extents)
        return place.read(self.context.store)


def num_list_parts(num_objects: int, num_readers: int) -> int:
    """Count the objects that list what tasks gathered; 0 where the readers carry the names."""
    return -(-num_objects // MAX_LISTED) if num_objects * num_readers > MAX_CARRIED else 0


def cut_and_merge(
    scratch: StepContext,
    committed: Mapping[str, Commit],
    gathers: Iterable[G],
    gather: Callable[[G], Commit],
    num_ranges: int,
    merge_of: Callable[[int, Gathered], M],
    merge: Callable[[M], Commit],
    distribute: Distribute,
    described: tuple[str, str],
) -> tuple[Output, ...]:
    """Gather, then merge; return what the merges wrote, in the order of ranges.

    Each gathering task writes an extent a range, if there are such tasks. `merge_of` makes the
    task of a range from its number and what all have written. Tasks that are `committed` are
    not repeated.
    """
    commits = run_named(committed, list(gathers), gather, distribute, described[0])
    gathered = Gathered.of(scratch, gathered_objects(commits), num_ranges)
    merges = [merge_of(number, gathered) for number in range(num_ranges)]
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


def gathering(name: str) -> str:
    """Name a gathering task; commits of earlier versions, an object a range, have other names."""
    return f"gathered-{name}"


def gathered_objects(commits: Sequence[Commit]) -> list[Output]:
    """Return the one object of each gathering task."""
    return [output for commit in commits for output in commit.outputs]


def put_extents(
    context: StepContext, name: str, suffix: str, extents: Iterable[bytes], tally: Tally
) -> Output:
    """Store extents as one object."""
    return context.put_output(name, suffix, join_extents(list(extents)), tally)


def commit_ranges(context: StepContext, name: str, suffix: str, ranges: Iterable[bytes]) -> Commit:
    """Store a task's ranges as extents, and commit them, without utterances of their own."""
    return commit_objects(context, name, [put_extents(context, name, suffix, ranges, Tally())])


def commit_objects(context: StepContext, name: str, outputs: Iterable[Output]) -> Commit:
    """Commit objects without utterances of their own."""
    return context.commit(
        Commit(name, context.fingerprint, tuple(outputs), None, Tally(), quarantined=Tally())
    )
