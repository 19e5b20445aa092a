"""Run a step: find its manifest, or do its tasks, add up their commits and write the manifest.

A step's driver lists the commits of earlier attempts, runs the tasks that have none, in waves, and
folds all commits in groups. The step ends as soon as its tasks have lost more than its loss budget
allows. An increment's step is joined with that of the run it extends.

A commit takes 6.7 kB in the driver, which has no room for a million. Up to 4,000 tasks return their
commits, and the driver folds them as one group. More tasks return their losses alone. Other tasks
then read 1,000 commits each, and return what a manifest needs of them. The driver keeps totals, and
12 bytes an output; the outputs' lines lie on its disk.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, read_checked
from infra.task_metrics import ObservedFunction
from pipeline.packing import runs_by_bytes
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import (
    Commit,
    Repetition,
    StepContext,
    Task,
    committed_tasks,
    each_commit,
    fingerprint,
    step_context,
)
from pipeline.runs.increment import BaseStep, read_base
from pipeline.runs.manifest import (
    MAX_LISTED,
    LinesOnDisk,
    Manifest,
    Output,
    Outputs,
    differences,
    input_digests,
    manifest_uri,
    parse_manifest,
    read_manifest,
)
from pipeline.runs.names import (
    ACCESS_DENIED,
    COMMITS_FOLDER,
    MISSING_OBJECT,
    OUTSIDE_PREFIXES,
    task_name,
)

MAX_HELD = 4_000
"""Up to so many tasks, the driver holds a step's commits itself: 27 MB."""

WAVE_TASKS = 20_000
"""So many tasks are planned and run at a time; the next begin when the last of them has ended."""

GROUP_COMMITS = 1_000
"""A task folds so many commits, and returns 250 kB."""

GROUP_BYTES = 2**20
"""Of commits with many outputs a task folds so many bytes, or one commit; it returns as many."""

GROUPS_AT_A_TIME = 64
"""The driver receives the folds of so many groups at a time, 16 MB; of large commits 64 MB."""

WITHOUT_LATTICE = "without_lattice"
"""The statistic of a commit that says of utterances, by their ids, why they have no lattice.

They keep the teacher's own targets, so no ledger has them. They count as losses all the same.
"""

_FIRST = -1  # the group of outputs that come before those of tasks

Input = TypeVar("Input")
T = TypeVar("T")
R = TypeVar("R")
N = TypeVar("N", bound=Task)

Statistics = Mapping[str, Any]


@runtime_checkable
class Distribute(Protocol):
    """Run a function over elements on a cluster or in a loop; results keep the order."""

    def __call__(
        self, elements: Sequence[T], function: Callable[[T], R], description: str
    ) -> list[R]:
        """Apply `function` to each element."""
        ...


def serially(elements: Sequence[T], function: Callable[[T], R], description: str) -> list[R]:
    """Run tasks one after the other in this process."""
    del description
    return [function(element) for element in elements]


@dataclass(frozen=True, slots=True)
class Extension:
    """Extension says how an increment's step is joined with that of its base.

    `statistics` adds its statistics to those of the base's manifest. `order` permutes the outputs
    of both, of which the base's are first. A step that has judged `all_again` what its base has
    read counts in its own tallies and ledgers what the base has left out.
    """

    statistics: Callable[[Manifest, Statistics], Statistics]
    order: Callable[[Sequence[Any]], Sequence[Any]] = list
    all_again: bool = False


@dataclass(frozen=True, slots=True)
class StepSpec:
    """StepSpec holds what identifies a step's work: its name, configuration and inputs.

    `reads` names the steps whose manifests are inputs; `digests` holds the SHA-256 of all other
    inputs by name. `engines` are distributions that this step's bytes depend on, besides those of
    its kind. With an `extension` an increment extends the step of its base.
    """

    store: ObjectStore
    run_uri: str
    step: str
    config: Mapping[str, Any]
    reads: Sequence[str] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    repetition: Repetition = Repetition.SAME_BYTES
    engines: Sequence[str] = ()
    extension: Extension | None = None


@dataclass(frozen=True, slots=True)
class StepRun:
    """StepRun is an unfinished step in its driver; tasks receive its `context` alone.

    Inputs include one for each metadata object. An increment's step has a `base`.
    """

    context: StepContext
    config: Mapping[str, Any]
    inputs: Mapping[str, str]
    base: BaseStep | None

    @property
    def manifest(self) -> "partial[Manifest]":
        """The constructor of the step's manifest: it takes what the step has made, by name."""
        versions = self.context.versions
        return partial(Manifest, self.context.step, self.config, self.inputs, versions=versions)

    def lossless(
        self, tally: Tally, outputs: Outputs = (), statistics: Statistics | None = None
    ) -> Manifest:
        """Make the manifest of a step that loses no utterance of `tally`."""
        return self.manifest(
            outputs=outputs, tally_in=tally, tally_out=tally, statistics=statistics or {}
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """StepResult holds a step's manifest, and whether an earlier run had finished the step."""

    manifest: Manifest
    was_finished: bool


def run_step(
    spec: StepSpec,
    make: Callable[[StepRun], Manifest | None],
    barrier: Callable[[], object] = lambda: None,
    base: BaseStep | None = None,
) -> StepResult:
    """Return the manifest of a finished step; else make it and store it.

    Of several ranks that run one step, `make` returns the manifest on one, which stores it, and
    None on the others, which read it after the `barrier`. A caller that has read the `base` of an
    increment's step gives it. ValueError if another recipe or other inputs made the manifest, or if
    the base has not finished the step or has other settings.
    """
    if spec.extension is not None and base is None:
        base = read_base(spec.store, spec.run_uri, spec.step, spec.config)
    # Inputs count by their manifests' digests, so changed inputs change the fingerprint.
    inputs = {**input_digests(spec.store, spec.run_uri, spec.reads), **spec.digests}
    inputs |= base.digests if base else {}
    context = step_context(
        spec.store, spec.run_uri, spec.step, spec.config, inputs, spec.repetition, spec.engines
    )
    if (finished := finished_manifest(context, spec.config, inputs)) is not None:
        return StepResult(finished, was_finished=True)
    # Until its manifest is stored, the step does not exist for its readers.
    made = make(StepRun(context, spec.config, inputs, base))
    if made is None:
        barrier()
        stored = read_manifest(spec.store, spec.run_uri, spec.step)
        return StepResult(stored, was_finished=False)
    if base is not None and spec.extension is not None:
        made = _joined(context, base, made, spec.extension)
    # Parts come before the manifest: without it they are orphans, and the same bytes come again.
    outputs = context.in_parts("outputs", made.outputs)
    ledgers = context.in_parts("ledgers", made.ledgers)
    manifest = replace(made, outputs=outputs, ledgers=ledgers)
    write_manifest(context, manifest)
    barrier()
    return StepResult(manifest, was_finished=False)


def finished_manifest(
    context: StepContext, config: Mapping[str, Any], inputs: Mapping[str, str]
) -> Manifest | None:
    """Read the manifest of this step if it is done.

    ValueError if it was not made from `config` and `inputs`; it names what differs.
    """
    uri = manifest_uri(context.run_uri, context.step)
    try:
        parse = partial(parse_manifest, context.store, context.run_uri)
        manifest = read_checked(context.store, uri, parse)
    except ObjectNotFound:
        return None
    # A finished step may be of other versions: all of its bytes are, and they are there. What an
    # increment inherits has the inputs of its base.
    inputs = manifest.inputs if manifest.is_inherited else inputs
    own = fingerprint(config, inputs, context.versions)
    if fingerprint(manifest.config, manifest.inputs, context.versions) != own:
        raise ValueError(
            f"{uri} was made from another recipe or other inputs"
            f"{differences(manifest, config, inputs)}: use another --run, or remove {context.step}"
        )
    return manifest


def write_manifest(context: StepContext, manifest: Manifest) -> None:
    """Store a finished step's manifest, unless another driver has stored one.

    Equal bytes are this driver's own, if the answer to its write was lost, or those of a driver
    that did the same work. ValueError if they differ.
    """
    uri = manifest_uri(context.run_uri, context.step)
    if context.store.put_if_absent(uri, manifest.to_bytes()):
        return
    stored = finished_manifest(context, manifest.config, manifest.inputs)
    if stored is None or stored.to_bytes() != manifest.to_bytes():
        raise ValueError(
            f"{uri}: another driver finished this step first, and its result differs though the "
            "recipe and inputs are equal; it stays. Run the same command again to use it"
        )


def _joined(context: StepContext, base: BaseStep, own: Manifest, extension: Extension) -> Manifest:
    """Join what an increment's step has made with all that its base has."""
    before, extends = base.manifest, base.extended(all_again=extension.all_again)
    # One that has judged all again has also the ledger rows that the base has.
    ledgers = () if extension.all_again else base.seen(before.ledgers)
    return replace(
        own,
        outputs=_union(context, "outputs", base.seen(before.outputs), own.outputs, extension.order),
        ledgers=_union(context, "ledgers", ledgers, own.ledgers, list),
        tally_in=extends.tally_in + own.tally_in,
        tally_out=extends.tally_out + own.tally_out,
        quarantined=extends.quarantined + own.quarantined,
        unselected=extends.unselected + own.unselected,
        statistics=extension.statistics(before, own.statistics),
        extends=extends,
    )


def _union(
    context: StepContext,
    name: str,
    before: Iterable[Output],
    own: Iterable[Output],
    order: Callable[[Sequence[Any]], Sequence[Any]],
) -> Outputs:
    # 300 bytes an output: a million hours' manifests are written again in a minute.
    lines = LinesOnDisk()
    for group, outputs in enumerate((before, own)):
        lines.add(group, b"".join(output.to_line() for output in outputs))
    return _listed(context, name, lines, order)


def _listed(
    context: StepContext,
    name: str,
    lines: LinesOnDisk,
    order: Callable[[Sequence[Any]], Sequence[Any]],
    most: int | None = None,
) -> Outputs:
    """Return outputs as a manifest lists them: more than so many are stored in parts."""
    if len(lines) > (MAX_LISTED if most is None else most):
        return context.put_parts(name, lines.in_order(order))
    return tuple(map(Output.from_line, lines.in_order(order)))


class LossBudgetExceededError(Exception):
    """More utterances were quarantined than the recipe's loss budget allows."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss counts by their reasons the utterances that a task has lost.

    `example` is a ledger, or a row of one that is not stored. Utterances that lattice decoding has
    left without a lattice are in no ledger; one of them is the `utterance`.
    """

    task: str
    reasons: Counter[str] = field(default_factory=Counter)
    example: str = ""
    without_lattice: Counter[str] = field(default_factory=Counter)
    utterance: str = ""

    @classmethod
    def over_budget(cls, task: str, rows: Sequence[Quarantined]) -> "Loss":
        """Return the result of a task that alone loses more than its step may: it ends early.

        It is not committed. It is a result and no error, since Spark would repeat a failed task.
        """
        example = f"{rows[-1].utterance_id} ({rows[-1].detail})"
        return cls(task, Counter(row.reason for row in rows), example)

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(
            self.task,
            self.reasons + other.reasons,
            self.example or other.example,
            self.without_lattice + other.without_lattice,
            self.utterance or other.utterance,
        )

    @property
    def num_lost(self) -> int:
        """The number of utterances."""
        return self.reasons.total() + self.without_lattice.total()


W = TypeVar("W", bound=Commit | Loss)


def loss_of(result: Commit | Loss) -> Loss:
    """Return a task's loss, on its worker.

    A function, as cloudpickle would send a class method with all that its module imports.
    """
    if isinstance(result, Loss):
        return result
    ledger, without_lattice = result.ledger, result.statistics.get(WITHOUT_LATTICE, {})
    return Loss(
        result.task,
        Counter(ledger.reasons if ledger else {}),
        ledger.key if ledger else "",
        Counter(each["reason"] for each in without_lattice.values()),
        min(without_lattice, default=""),
    )


class LossWatch:
    """LossWatch ends a step whose tasks have lost more utterances than its loss budget allows.

    In the driver it adds up their losses as they end; each task counts once. The budget is a share
    of the `num_utterances` that the step reads.
    """

    def __init__(self, loss_budget: float, num_utterances: int) -> None:
        self.loss_budget, self.num_utterances = loss_budget, num_utterances
        self._total = Loss("all tasks")
        self._seen: set[str] = set()

    @property
    def max_lost(self) -> int:
        """The most utterances that may be lost."""
        # As it is written: 0.29 of 100 are 29, and 28.999999999999996 as floats.
        return int(Fraction(str(self.loss_budget)) * self.num_utterances)

    def see(self, result: Commit | Loss) -> None:
        """Count a task's loss; LossBudgetExceededError when the step has lost too much."""
        if result.task not in self._seen:
            self._seen.add(result.task)
            self._total += loss_of(result)
            self.check(self._total)

    def check(self, loss: Loss) -> None:
        """LossBudgetExceededError if too many are lost: value, bound, reasons and remedy."""
        if loss.num_lost <= self.max_lost:
            return
        reasons = loss.reasons + loss.without_lattice
        states = {"quarantined": loss.reasons, "without a lattice": loss.without_lattice}
        are = " or ".join(name for name, counts in states.items() if counts)
        said = (
            f"{loss.num_lost} of {self.num_utterances} utterances {are}, the loss budget is "
            f"{self.loss_budget:.2%}; reasons: {dict(reasons.most_common())}"
        )
        if loss.without_lattice:
            ledgers = f"see the ledgers, such as {loss.example}; " if loss.reasons else ""
            raise LossBudgetExceededError(
                f"{said}, such as {loss.utterance}: {ledgers}raise loss_budget, or begin a fresh "
                "--run with other beams or search_seconds in targets.lattices"
            )
        may_be_back = {MISSING_OBJECT, ACCESS_DENIED} & reasons.keys()
        again = "once audio is back, megahour retry reads it again, or of ingest another --run; "
        remedy = again if may_be_back else ""
        if OUTSIDE_PREFIXES in reasons:
            remedy += "name the audio's folders in corpus.audio_prefixes and use another --run; "
        raise LossBudgetExceededError(
            f"{said}. See the ledgers, such as {loss.example}; {remedy}fix the data, or raise "
            "loss_budget"
        )


def _watched(run_task: Callable[[T], W], watch: LossWatch | None) -> Callable[[T], W]:
    return run_task if watch is None else ObservedFunction(run_task, loss_of, watch.see)


def _commit_each(
    committed: Mapping[str, Commit],
    tasks: Mapping[str, T],
    run_task: Callable[[T], Commit | Loss],
    distribute: Distribute,
    description: str,
    watch: LossWatch | None,
) -> dict[str, Commit]:
    """Run the tasks that are not among the `committed`; return the commits of all by name."""
    by_name = {name: found for name in tasks if (found := committed.get(name))}
    if watch is not None:
        for commit in by_name.values():
            watch.see(commit)
    pending = [task for name, task in tasks.items() if name not in by_name]
    for result in distribute(pending, _watched(run_task, watch), description):
        if watch is not None:
            watch.see(result)  # a cluster shows the last ones only now
        assert isinstance(result, Commit), "a watch has ended the step over its budget"
        by_name[result.task] = result
    return by_name


class ScratchTasks:
    """ScratchTasks runs tasks below scratch/ in a step's folder, for the step's other tasks.

    No manifest names what they store. Tasks that earlier attempts have committed are not repeated.
    """

    def __init__(self, context: StepContext, distribute: Distribute) -> None:
        self.context = context.scratch
        self.distribute = distribute
        self._committed = committed_tasks(self.context)

    def run(
        self,
        tasks: Sequence[N],
        run_task: Callable[[N], Commit],
        description: str,
        watch: LossWatch | None = None,
    ) -> list[Commit]:
        """Return the commits of all tasks, in their order.

        LossBudgetExceededError as soon as `watch` has seen too much lost.
        """
        named = {task.name: task for task in tasks}
        commits = _commit_each(
            self._committed, named, run_task, self.distribute, description, watch
        )
        return [commits[name] for name in named]


class NumberedTasks(Mapping[str, T], Generic[Input, T]):
    """NumberedTasks makes the task of an input when it is asked for; tasks are named by number."""

    def __init__(self, inputs: Sequence[Input], make: Callable[[str, Input], T]) -> None:
        self._inputs = inputs
        self._make = make

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[str]:
        return map(task_name, range(len(self._inputs)))

    def __getitem__(self, name: str) -> T:
        return self._make(name, self._inputs[int(name)])


def no_statistics(_: Sequence[Statistics]) -> Statistics:
    """Add up the statistics of tasks that have none."""
    return {}


@dataclass(frozen=True, slots=True)
class TaskPlan(Generic[T]):
    """TaskPlan holds a step's tasks by name, their function, and how their commits add up.

    `fold` adds up the statistics of tasks, in the order of tasks, or of sums of tasks. `statistics`
    makes those of the manifest of the sum of all. `order` permutes the outputs of all tasks, with
    the `first_outputs`, of no task, before them.

    `num_utterances` is the number that all tasks read together, where it is known before: then
    the step ends as soon as its tasks have lost more than the loss budget. Tasks start in the order
    of their `size`, the longest first: the last one to end is then a short one. Where a few tasks
    have more outputs than a driver can hold, a step `has_many_outputs`: commits of any number of
    tasks are folded by other tasks, in groups by their bytes.
    """

    tasks: Mapping[str, T]
    run_task: Callable[[T], Commit | Loss]
    distribute: Distribute
    loss_budget: float
    fold: Callable[[Sequence[Statistics]], Statistics] = no_statistics
    statistics: Callable[[Statistics], Statistics] = dict
    order: Callable[[Sequence[Any]], Sequence[Any]] = list
    num_utterances: int | None = None
    size: Callable[[T], float] = lambda _: 0.0
    first_outputs: Sequence[Output] = ()
    has_many_outputs: bool = False

    def longest_first(self, names: Iterable[str]) -> dict[str, T]:
        """Return the tasks of these names in the order in which they start."""
        # Results go back by name, so the order in which tasks start changes no byte.
        tasks = ((name, self.tasks[name]) for name in names)
        return dict(sorted(tasks, key=lambda task: self.size(task[1]), reverse=True))


def run_tasks(step: StepRun, plan: TaskPlan[T]) -> Manifest:
    """Run the tasks that no commit names yet, and make the manifest of the commits of all.

    Of more than 4,000 tasks, sums of floats in statistics are those of groups.
    LossBudgetExceededError if too many utterances are lost.
    """
    driver = _Driver(step, plan)
    # After a kill, the commits of earlier attempts are the place to resume from.
    if driver.is_held:
        driver.held = _commit_each(
            committed_tasks(step.context),
            plan.longest_first(driver.names),
            plan.run_task,
            plan.distribute,
            step.context.step,
            driver.watch,
        )
    else:
        driver.run_in_waves()
    return driver.manifest()


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive tasks, and how their statistics are folded."""

    context: StepContext
    number: int
    tasks: tuple[str, ...]
    fold: Callable[[Sequence[Statistics]], Statistics]


@dataclass(frozen=True, slots=True)
class _Fold:
    """Sums of a group's commits, and the lines of their outputs and ledgers."""

    group: int
    num_tasks: int
    loss: Loss
    tally_in: Tally
    tally_out: Tally
    quarantined: Tally
    unselected: Tally
    statistics: Statistics
    outputs: bytes
    ledgers: bytes

    @classmethod
    def of(cls, group: _Group, commits: Sequence[Commit]) -> "_Fold":
        """Add up the commits of a group's tasks."""
        ledgers = (commit.ledger for commit in commits if commit.ledger)
        outputs = chain.from_iterable(commit.outputs for commit in commits)
        return cls(
            group=group.number,
            num_tasks=len(commits),
            loss=sum(map(loss_of, commits), Loss(f"group {group.number}")),
            tally_in=sum((commit.tally_in for commit in commits), Tally()),
            tally_out=sum((commit.tally_out for commit in commits), Tally()),
            quarantined=sum((commit.quarantined for commit in commits), Tally()),
            unselected=sum((commit.unselected for commit in commits), Tally()),
            statistics=group.fold([commit.statistics for commit in commits]),
            outputs=b"".join(output.to_line() for output in outputs),
            ledgers=b"".join(ledger.to_line() for ledger in ledgers),
        )


def _fold_group(group: _Group) -> _Fold:
    """Read and add up the commits of a group's tasks; ValueError if one is of another recipe."""
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
    return _Fold.of(group, commits)


@dataclass(frozen=True, slots=True)
class _LossOnly(Generic[T]):
    """Runs a task, and returns of its commit what the driver must know; equal where its task is."""

    run_task: Callable[[T], Commit | Loss]

    def __call__(self, task: T) -> Loss:
        return loss_of(self.run_task(task))


class _Driver(Generic[T]):
    """The driver of a step's tasks."""

    def __init__(self, step: StepRun, plan: TaskPlan[T]) -> None:
        self.step, self.context, self.plan = step, step.context, plan
        self.names = list(plan.tasks)
        self.watch = None
        if plan.num_utterances is not None:
            self.watch = LossWatch(plan.loss_budget, plan.num_utterances)
        # Commits of a small step stay in the driver.
        self.is_held = len(self.names) <= MAX_HELD and not plan.has_many_outputs
        self.held: dict[str, Commit] = {}
        # The bytes of commits, where groups depend on them.
        self.sizes: Mapping[str, int] = {}
        self.folds: dict[int, _Fold] = {}
        self.outputs, self.ledgers = LinesOnDisk(), LinesOnDisk()
        self.outputs.add(_FIRST, b"".join(output.to_line() for output in plan.first_outputs))

    def run_in_waves(self) -> None:
        """Run the tasks without a commit; the driver receives their losses alone."""
        committed = self._fold_earlier()
        pending = [name for name in self.names if name not in committed]
        for first in range(0, len(pending), WAVE_TASKS):
            names = pending[first : first + WAVE_TASKS]
            tasks = list(self.plan.longest_first(names).values())
            run_task = _watched(_LossOnly(self.plan.run_task), self.watch)
            description = f"{self.context.step} {names[0]}..{names[-1]}"
            for loss in self.plan.distribute(tasks, run_task, description):
                if self.watch is not None:
                    self.watch.see(loss)
        if self.plan.has_many_outputs and pending:
            self.sizes = self._sizes_of_commits()

    def _fold_earlier(self) -> Collection[str]:
        """Let tasks fold what earlier attempts have committed; return the names of those tasks.

        Other recipes are refused, and losses count, before any task runs.
        """
        committed = self._sizes_of_commits()
        if self.plan.has_many_outputs:
            self.sizes = committed
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
            if self.watch is not None:
                self.watch.see(fold.loss)
            if is_bounded and fold.num_tasks == sizes[fold.group]:
                self._keep(fold)
        return committed.keys()

    def _sizes_of_commits(self) -> dict[str, int]:
        """Name the tasks with a commit, and its bytes, by one LIST."""
        folder = join_uri(self.context.run_uri, self.context.step, COMMITS_FOLDER)
        return {
            found.uri.rpartition("/")[2].removesuffix(".json"): found.num_bytes
            for found in self.context.store.list_each(folder)
        }

    def _groups(self) -> Iterator[_Group]:
        num_bytes = [self.sizes.get(name, 0) for name in self.names]
        most = MAX_HELD if self.is_held else GROUP_COMMITS
        for number, place in enumerate(runs_by_bytes(num_bytes, GROUP_BYTES, most)):
            yield _Group(self.context, number, tuple(self.names[place]), self.plan.fold)

    def _folded(self, groups: Sequence[_Group]) -> Iterator[_Fold]:
        if self.is_held:
            for group in groups:
                yield _Fold.of(group, [self.held[name] for name in group.tasks])
            return
        num_bytes = [sum(self.sizes.get(name, 0) for name in group.tasks) for group in groups]
        most_bytes = GROUPS_AT_A_TIME * GROUP_BYTES
        for place in runs_by_bytes(num_bytes, most_bytes, GROUPS_AT_A_TIME):
            description = f"{self.context.step} commits"
            yield from self.plan.distribute(groups[place], _fold_group, description)

    def _keep(self, fold: _Fold) -> None:
        self.outputs.add(fold.group, fold.outputs)
        self.ledgers.add(fold.group, fold.ledgers)
        self.folds[fold.group] = replace(fold, outputs=b"", ledgers=b"")

    def manifest(self) -> Manifest:
        """Fold the commits that are not folded yet, check the loss budget, and add all up."""
        for fold in self._folded([g for g in self._groups() if g.number not in self.folds]):
            self._keep(fold)
        folds = [self.folds[number] for number in sorted(self.folds)]
        quarantined = sum((fold.quarantined for fold in folds), Tally())
        tally_in = sum((fold.tally_in for fold in folds), Tally())
        # The fingerprint leaves the budget out, so a raised one resumes from these commits.
        whole = LossWatch(self.plan.loss_budget, tally_in.utterances)
        whole.check(sum((fold.loss for fold in folds), Loss("all tasks")))
        most = len(self.outputs) if self.is_held else None
        return self.step.manifest(
            outputs=_listed(self.context, "outputs", self.outputs, self.plan.order, most),
            ledgers=_listed(self.context, "ledgers", self.ledgers, list),
            tally_in=tally_in,
            tally_out=sum((fold.tally_out for fold in folds), Tally()),
            quarantined=quarantined,
            unselected=sum((fold.unselected for fold in folds), Tally()),
            statistics=self.plan.statistics(self.plan.fold([fold.statistics for fold in folds])),
        )
