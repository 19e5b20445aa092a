"""Run a step once: find its manifest, or make its contents and write the manifest.

A step with tasks runs those that no commit names yet, and adds up all commits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from infra.store.object_store import ObjectNotFound, ObjectStore, read_checked
from pipeline.records import Tally
from pipeline.runs.commit import (
    Commit,
    Repetition,
    StepContext,
    committed_tasks,
    fingerprint,
    step_context,
)
from pipeline.runs.ledger import Loss, LossLimit, LossWatch, Overrun, check_loss_budget, loss_of
from pipeline.runs.manifest import (
    Extended,
    Manifest,
    Output,
    Outputs,
    differences,
    input_digests,
    manifest_uri,
    parse_manifest,
    read_manifest,
)

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W", bound=Commit | Overrun | Loss)


@runtime_checkable
class Distribute(Protocol):
    """Run a function over elements on a cluster or in a loop; results keep the order."""

    def __call__(
        self, elements: Sequence[T], function: Callable[[T], R], description: str
    ) -> list[R]:
        """Apply `function` to each element."""
        ...


@dataclass(frozen=True, slots=True)
class StepSpec:
    """StepSpec holds what identifies a step's work: its name, configuration and inputs.

    `reads` names the steps whose manifests are inputs; `digests` holds the SHA-256 of all other
    inputs by name. `engines` are distributions that this step's bytes depend on, besides those of
    its kind.
    """

    store: ObjectStore
    run_uri: str
    step: str
    config: Mapping[str, Any]
    reads: Sequence[str] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    repetition: Repetition = Repetition.SAME_BYTES
    engines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class StepContents:
    """StepContents holds what a step made, as its manifest lists it."""

    outputs: Outputs
    tally_in: Tally
    tally_out: Tally
    ledgers: Outputs = ()
    quarantined: Tally = field(default_factory=Tally)
    unselected: Tally = field(default_factory=Tally)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    id_index: tuple[Output, ...] = ()
    stream_means: tuple[Output, ...] = ()
    extends: Extended | None = None

    @classmethod
    def of_all(
        cls,
        tally: Tally,
        outputs: Outputs = (),
        statistics: Mapping[str, Any] | None = None,
    ) -> "StepContents":
        """Make the contents of a step that loses no utterance of `tally`."""
        return cls(outputs, tally, tally, statistics=statistics or {})


@dataclass(frozen=True, slots=True)
class StepResult:
    """StepResult holds a step's manifest, and whether an earlier run had finished the step."""

    manifest: Manifest
    was_finished: bool


def run_step(
    spec: StepSpec,
    make: Callable[[StepContext], StepContents | None],
    barrier: Callable[[], object] = lambda: None,
) -> StepResult:
    """Return the manifest of a finished step; else make its contents and write the manifest.

    Of several ranks that run one step, `make` returns contents on one, which writes the manifest,
    and None on the others, which read it after the `barrier`. ValueError if another recipe or
    other inputs made the manifest.
    """
    # Inputs count by their manifests' digests, so changed inputs change the fingerprint.
    inputs = {**input_digests(spec.store, spec.run_uri, spec.reads), **spec.digests}
    place = spec.store, spec.run_uri, spec.step
    context = step_context(*place, spec.config, inputs, spec.repetition, spec.engines)
    if (finished := finished_manifest(context, spec.config, inputs)) is not None:
        return StepResult(finished, was_finished=True)
    # Until its manifest is stored, the step does not exist for its readers.
    contents = make(context)
    if contents is not None:
        manifest = _manifest(spec, inputs, context, contents)
        write_manifest(context, manifest)
    barrier()
    if contents is None:
        manifest = read_manifest(spec.store, spec.run_uri, spec.step)
    return StepResult(manifest, was_finished=False)


def _manifest(
    spec: StepSpec, inputs: Mapping[str, str], context: StepContext, contents: StepContents
) -> Manifest:
    # Parts come before the manifest: without it they are orphans, and the same bytes come again.
    return Manifest(
        step=spec.step,
        config=spec.config,
        inputs=inputs,
        outputs=context.in_parts("outputs", contents.outputs),
        ledgers=context.in_parts("ledgers", contents.ledgers),
        tally_in=contents.tally_in,
        tally_out=contents.tally_out,
        quarantined=contents.quarantined,
        unselected=contents.unselected,
        statistics=contents.statistics,
        versions=context.versions,
        id_index=contents.id_index,
        stream_means=contents.stream_means,
        extends=contents.extends,
    )


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


class WatchedFunction(Generic[T, W]):
    """WatchedFunction runs a task and lets the watch see its loss, as a plain loop needs it.

    A cluster runs `run_task` on its workers, and gives `watch` in the driver each result's loss.
    """

    def __init__(self, run_task: Callable[[T], W], watch: LossWatch) -> None:
        self.run_task = run_task
        self.watch = watch

    def __call__(self, task: T) -> W:
        """Run the task; LossBudgetExceededError when all tasks so far have lost too much."""
        result = self.run_task(task)
        self.watch.see(loss_of(result))
        return result


@dataclass(frozen=True, slots=True)
class TaskPlan(Generic[T]):
    """TaskPlan holds a step's tasks by name, their function, and how their commits add up.

    `num_utterances` is the number that all tasks read together, where it is known before: then
    the step ends as soon as its tasks have lost more than the loss budget. Tasks start in the order
    of their `size`, the longest first: the last one to end is then a short one.
    """

    tasks: Mapping[str, T]
    run_task: Callable[[T], Commit | Overrun]
    distribute: Distribute
    loss_budget: float
    output_order: Callable[[list[Output]], list[Output]] = list
    statistics: Callable[[list[Commit]], Mapping[str, Any]] = lambda _: {}
    num_utterances: int | None = None
    size: Callable[[T], float] = lambda _: 0.0

    def longest_first(self, names: Iterable[str]) -> dict[str, T]:
        """Return the tasks of these names in the order in which they start."""
        # Results go back by name, so the order in which tasks start changes no byte.
        tasks = ((name, self.tasks[name]) for name in names)
        return dict(sorted(tasks, key=lambda task: self.size(task[1]), reverse=True))


def run_tasks(context: StepContext, plan: TaskPlan[T]) -> StepContents:
    """Run the tasks that no commit names yet, and add up the commits of all.

    LossBudgetExceededError if too many utterances were quarantined.
    """
    # After a kill, the commits of earlier attempts are the place to resume from.
    committed = committed_tasks(context)
    watch = None
    if plan.num_utterances is not None:
        watch = LossWatch(context, LossLimit(plan.loss_budget, plan.num_utterances))
    arguments = plan.longest_first(plan.tasks), plan.run_task, plan.distribute, context.step, watch
    by_name = {commit.task: commit for commit in commit_each(committed, *arguments)}
    commits = [by_name[name] for name in plan.tasks]
    quarantined = sum((commit.quarantined for commit in commits), Tally())
    tally_in = sum((commit.tally_in for commit in commits), Tally())
    ledgers = tuple(commit.ledger for commit in commits if commit.ledger)
    # The fingerprint leaves the budget out, so a raised one resumes from these commits.
    check_loss_budget(
        context.store, context.run_uri, ledgers, quarantined, tally_in, plan.loss_budget
    )
    outputs = [output for commit in commits for output in commit.outputs]
    return StepContents(
        outputs=tuple(plan.output_order(outputs)),
        tally_in=tally_in,
        tally_out=sum((commit.tally_out for commit in commits), Tally()),
        ledgers=ledgers,
        quarantined=quarantined,
        unselected=sum((commit.unselected for commit in commits), Tally()),
        statistics=plan.statistics(commits),
    )


def commit_each(
    committed: Mapping[str, Commit],
    tasks: Mapping[str, T],
    run_task: Callable[[T], Commit | Overrun],
    distribute: Distribute,
    description: str,
    watch: LossWatch | None = None,
) -> list[Commit]:
    """Run the tasks that are not among the `committed`; return all commits in the tasks' order.

    LossBudgetExceededError as soon as `watch` has seen too much lost.
    """
    pending = [task for name, task in tasks.items() if name not in committed]
    if watch is None:
        new = distribute(pending, run_task, description)
    else:
        for name in tasks.keys() & committed.keys():
            watch.see(loss_of(committed[name]))
        new = distribute(pending, WatchedFunction(run_task, watch), description)
        for result in new:  # a cluster shows the last ones only now
            watch.see(loss_of(result))
    by_name = dict(committed)
    for result in new:
        assert isinstance(result, Commit), "a watch has ended the step at an overrun"
        by_name[result.task] = result
    return [by_name[name] for name in tasks]
