"""Run a step of many tasks: in waves, with commits that tasks fold, not the driver.

A commit takes 6.7 kB in the driver, and a million of them no driver has room for. Here tasks return
their losses alone. Other tasks then read 1,000 commits each and return what a manifest needs of
them. The driver keeps totals, and 12 bytes an output; the outputs' lines lie on its disk.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, TypeVar

from infra.store.object_store import join_uri
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, each_commit
from pipeline.runs.ledger import (
    Loss,
    LossLimit,
    LossWatch,
    Overrun,
    ledger_reasons,
    loss_error,
    loss_of,
)
from pipeline.runs.names import COMMITS_FOLDER, task_name
from pipeline.runs.outputs import MAX_LISTED, LinesOnDisk, Output, Outputs
from pipeline.runs.step import StepContents, TaskPlan, WatchedFunction, run_tasks

MAX_HELD = 4_000
"""The driver holds the commits of a step of so many tasks, 27 MB."""

WAVE_TASKS = 20_000
"""So many tasks are planned and run at a time; the next begin when the last of them has ended."""

GROUP_COMMITS = 1_000
"""A task folds so many commits, and returns 250 kB."""

GROUP_BYTES = 2**20
"""Of commits with many outputs a task folds so many bytes, or one commit; it returns as many."""

GROUPS_AT_A_TIME = 64
"""The driver receives the folds of so many groups at a time, 16 MB; of large commits 64 MB."""

_FIRST = -1  # the group of outputs that come before those of tasks

Input = TypeVar("Input")
T = TypeVar("T")

Statistics = Mapping[str, Any]


class NumberedTasks(Mapping[str, T], Generic[Input, T]):
    """NumberedTasks makes the task of an input when it is asked for; tasks are named by number."""

    def __init__(self, inputs: Sequence[Input], make: Callable[[str, Input], T]) -> None:
        self._inputs = inputs
        self._make = make

    def __len__(self) -> int:
        """Return the number of inputs."""
        return len(self._inputs)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return map(task_name, range(len(self._inputs)))

    def __getitem__(self, name: str) -> T:
        """Make a task."""
        return self._make(name, self._inputs[int(name)])


def no_statistics(_: Sequence[Commit]) -> Statistics:
    """Fold commits whose step has none; a name, as tasks receive it."""
    return {}


@dataclass(frozen=True, slots=True)
class Folding:
    """Folding says how a step of many tasks adds up: its statistics, and the order of its outputs.

    `statistics` folds those of some commits, in the order of tasks, into those of one that did all
    their work. `order` permutes the outputs' numbers as the plan's `output_order` permutes outputs.
    `first` are outputs of no task, before all others. Where a task `has_many_outputs`, a few tasks
    have more than a driver can hold: any number is folded, in groups by the bytes of the commits.
    """

    statistics: Callable[[Sequence[Commit]], Statistics] = no_statistics
    order: Callable[[Sequence[int]], Sequence[int]] = lambda numbers: numbers
    first: Sequence[Output] = ()
    has_many_outputs: bool = False


@dataclass(frozen=True, slots=True)
class _Group:
    """Committed tasks of a group of consecutive ones, and how their statistics are folded."""

    context: StepContext
    number: int
    tasks: tuple[str, ...]
    statistics: Callable[[Sequence[Commit]], Statistics]


@dataclass(frozen=True, slots=True)
class _Fold:
    """Sums of a group's commits, and the lines of their outputs and ledgers.

    `whole` is a commit that did all their work, without the outputs; `reasons` are the ledgers'.
    """

    group: int
    num_tasks: int
    num_lost: int
    whole: Commit
    tally_out: Tally
    reasons: Counter[str]
    outputs: bytes = b""
    ledgers: bytes = b""


def runner_of(
    plan: TaskPlan[T], folding: Folding
) -> Callable[[StepContext, TaskPlan[T]], StepContents]:
    """Return the function that runs a plan: `run_tasks`, or one that folds commits.

    Up to 4,000 tasks the results are equal to the bit. Above, sums of floats are those of groups.
    """
    if len(plan.tasks) <= MAX_HELD and not folding.has_many_outputs:
        return run_tasks
    return lambda context, many: _ManyTasks(context, many, folding).run()


class _ManyTasks(Generic[T]):
    """The driver of one large step."""

    def __init__(self, context: StepContext, plan: TaskPlan[T], folding: Folding) -> None:
        self.context = context
        self.plan = plan
        self.folding = folding
        self.names = list(plan.tasks)
        # The bytes of commits, where groups depend on them.
        self.sizes: Mapping[str, int] = {}
        self.folds: dict[int, _Fold] = {}
        self.outputs, self.ledgers = LinesOnDisk(), LinesOnDisk()
        self.outputs.add(_FIRST, b"".join(output.to_line() for output in folding.first))

    def run(self) -> StepContents:
        """Run the tasks without a commit, fold all commits, and store the manifest's parts."""
        watch = None
        if self.plan.num_utterances is not None:
            limit = LossLimit(self.plan.loss_budget, self.plan.num_utterances)
            watch = LossWatch(self.context, limit)
        committed = self._committed()
        pending = [name for name in self.names if name not in committed]
        if self.folding.has_many_outputs:
            self.sizes = committed
        self._resume(committed, watch)
        for first in range(0, len(pending), WAVE_TASKS):
            self._run_wave(pending[first : first + WAVE_TASKS], watch)
        if self.folding.has_many_outputs and pending:
            self.sizes = self._committed()
        for fold in self._folded([g for g in self._groups() if g.number not in self.folds]):
            self._keep(fold)
        return self._contents()

    def _committed(self) -> dict[str, int]:
        """Name the tasks with a commit, and its bytes, by one LIST."""
        folder = join_uri(self.context.run_uri, self.context.step, COMMITS_FOLDER)
        return {
            found.uri.rpartition("/")[2].removesuffix(".json"): found.num_bytes
            for found in self.context.store.list_each(folder)
        }

    def _groups(self) -> Iterator[_Group]:
        num_bytes = [self.sizes.get(name, 0) for name in self.names]
        for number, place in enumerate(_slices(num_bytes, GROUP_COMMITS, GROUP_BYTES)):
            yield _Group(self.context, number, tuple(self.names[place]), self.folding.statistics)

    def _resume(self, committed: Mapping[str, int], watch: LossWatch | None) -> None:
        """Fold what earlier attempts have committed: other recipes are refused, losses count."""
        unknown = committed.keys() - set(self.names)
        for name in sorted(unknown)[:1]:
            self.context.committed(name)  # raises, as only another recipe has other tasks
        # Commits to come may move the bounds of groups by bytes.
        is_bounded = not self.sizes or committed.keys() >= set(self.names)
        sizes, begun = {}, []
        for group in self._groups():
            sizes[group.number] = len(group.tasks)
            if done := tuple(name for name in group.tasks if name in committed):
                begun.append(replace(group, tasks=done))
        for fold in self._folded(begun):
            if watch is not None:
                watch.see(Loss(f"group {fold.group}", fold.num_lost))
            if is_bounded and fold.num_tasks == sizes[fold.group]:
                self._keep(fold)

    def _run_wave(self, names: Sequence[str], watch: LossWatch | None) -> None:
        tasks = list(self.plan.longest_first(names).values())
        run_task = _LossOnly(self.plan.run_task)
        description = f"{self.context.step} {names[0]}..{names[-1]}"
        if watch is None:
            self.plan.distribute(tasks, run_task, description)
            return
        for loss in self.plan.distribute(tasks, WatchedFunction(run_task, watch), description):
            watch.see(loss)  # a cluster shows the last ones only now
        watch.end_wave()

    def _folded(self, groups: Sequence[_Group]) -> Iterator[_Fold]:
        num_bytes = [sum(self.sizes.get(name, 0) for name in group.tasks) for group in groups]
        for place in _slices(num_bytes, GROUPS_AT_A_TIME, GROUPS_AT_A_TIME * GROUP_BYTES):
            description = f"{self.context.step} commits"
            yield from self.plan.distribute(groups[place], _fold_group, description)

    def _keep(self, fold: _Fold) -> None:
        self.outputs.add(fold.group, fold.outputs)
        self.ledgers.add(fold.group, fold.ledgers)
        self.folds[fold.group] = replace(fold, outputs=b"", ledgers=b"")

    def _contents(self) -> StepContents:
        folds = [self.folds[number] for number in sorted(self.folds)]
        commits = [fold.whole for fold in folds]
        quarantined = sum((each.quarantined for each in commits), Tally())
        tally_in = sum((each.tally_in for each in commits), Tally())
        limit = LossLimit(self.plan.loss_budget, tally_in.utterances)
        if not limit.allows(quarantined.utterances):
            reasons = sum((fold.reasons for fold in folds), Counter[str]())
            example = json.loads(next(self.ledgers.in_order(lambda numbers: numbers)))["key"]
            raise loss_error(quarantined.utterances, limit, reasons, example)
        return StepContents(
            outputs=self._listed("outputs", self.outputs, self.folding.order),
            tally_in=tally_in,
            tally_out=sum((fold.tally_out for fold in folds), Tally()),
            ledgers=self._listed("ledgers", self.ledgers, lambda numbers: numbers),
            quarantined=quarantined,
            unselected=sum((each.unselected for each in commits), Tally()),
            statistics=self.plan.statistics(commits),
        )

    def _listed(
        self, name: str, lines: "LinesOnDisk", order: Callable[[Sequence[int]], Sequence[int]]
    ) -> Outputs:
        if len(lines) > MAX_LISTED:
            return self.context.put_parts(name, lines.in_order(order))
        return tuple(Output.from_line(line) for line in lines.in_order(order))


@dataclass(frozen=True, slots=True)
class _LossOnly(Generic[T]):
    """Runs a task, and returns of its commit what the driver must know."""

    run_task: Callable[[T], Commit | Overrun]

    def __call__(self, task: T) -> Loss | Overrun:
        return loss_of(self.run_task(task))


def _slices(num_bytes: Sequence[int], most: int, most_bytes: int) -> Iterator[slice]:
    """Divide a list into runs of at most so many and so many bytes; one alone may have more."""
    first = total = 0
    for place, size in enumerate(num_bytes):
        if place - first == most or (place > first and total + size > most_bytes):
            yield slice(first, place)
            first, total = place, 0
        total += size
    if first < len(num_bytes):
        yield slice(first, len(num_bytes))


def _fold_group(group: _Group) -> _Fold:
    """Add up the commits of a group's tasks; ValueError if one is of another recipe."""
    context = group.context
    uris = [context.commit_uri(task) for task in group.tasks]
    commits = list(each_commit(context.store, uris))
    for task, commit in zip(group.tasks, commits, strict=True):
        context.require_ours(commit)
        if commit.task != task:
            raise ValueError(
                f"{context.commit_uri(task)} is the commit of task {commit.task}: remove it and "
                "run the step again"
            )
    ledgers = [commit.ledger for commit in commits if commit.ledger]
    outputs = chain.from_iterable(commit.outputs for commit in commits)
    whole = Commit(
        task=group.tasks[0],
        fingerprint=context.fingerprint,
        outputs=(),
        ledger=None,
        tally_in=sum((each.tally_in for each in commits), Tally()),
        quarantined=sum((each.quarantined for each in commits), Tally()),
        unselected=sum((each.unselected for each in commits), Tally()),
        statistics=group.statistics(commits),
    )
    return _Fold(
        group=group.number,
        num_tasks=len(commits),
        num_lost=sum(loss_of(commit).num_lost for commit in commits),
        whole=whole,
        tally_out=sum((commit.tally_out for commit in commits), Tally()),
        reasons=ledger_reasons(context.store, context.run_uri, ledgers),
        outputs=b"".join(output.to_line() for output in outputs),
        ledgers=b"".join(ledger.to_line() for ledger in ledgers),
    )
