"""Data selection: hours drawn uniformly, whole speakers in nearly equal files (003 IV-B1).

Metadata objects of one speaker bucket hold all utterances of its speakers, so a task that reads
whole buckets can write whole speakers' files. Passes: digests of the metadata; a survey of each
bucket; a comparison of all buckets, range by range of hashes, which finds duplicates and the
priority where the budget is met; what is drawn of each bucket; and the files of neighbours.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from infra.store.object_store import ObjectStore, join_uri
from pipeline.filters import SelectionFilters
from pipeline.packing import group_buckets
from pipeline.runs.commit import Commit, StepContext, committed_tasks
from pipeline.runs.manifest import Output
from pipeline.runs.names import METADATA_FOLDER, SCRATCH_FOLDER, UNLABELLED, selection_step
from pipeline.runs.step import (
    Distribute,
    StepContents,
    StepResult,
    StepSpec,
    TaskPlan,
    commit_each,
    run_step,
    run_tasks,
)
from pipeline.shuffling import shuffled_order
from pipeline.steps.selection.buckets import (
    Bucket,
    digest_buckets,
    input_digests_of,
    list_metadata,
)
from pipeline.steps.selection.budget_cutoff import draw, num_ranges
from pipeline.steps.selection.index_bucket import SurveyTask, survey_bucket
from pipeline.steps.selection.pack_files import FilesTask, write_files
from pipeline.steps.selection.record_rules import Rules
from pipeline.steps.selection.select_bucket import DrawnTask, keep_drawn
from pipeline.steps.selection.statistics import require_eligible, selection_statistics


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """`hours` to select from the unlabelled metadata (0 = all), in files of `file_hours`.

    `filters` are for the unlabelled metadata too; they come before the budget.
    """

    hours: float
    file_hours: float
    seed: int
    filters: SelectionFilters = field(default_factory=SelectionFilters)

    def __post_init__(self) -> None:
        if self.hours < 0:
            raise ValueError(f"hours = {self.hours}: need 0 (all) or more")
        if self.file_hours <= 0:
            raise ValueError(f"file_hours = {self.file_hours}: need more than 0")

    @property
    def budget_ms(self) -> int:
        """The budget in milliseconds, 0 for none."""
        return round(self.hours * 3_600_000)

    def without_rules(self) -> "SelectionConfig":
        """Return the configuration that takes all utterances, in the same files."""
        return replace(self, hours=0.0, filters=SelectionFilters())


def select_utterances(
    store: ObjectStore,
    run_uri: str,
    subset: str,
    metadata_uri: str,
    config: SelectionConfig,
    loss_budget: float,
    distribute: Distribute,
) -> StepResult:
    """Select the utterances of one subset.

    The budget of hours and the filters are for the unlabelled subset; labelled and held-out ones
    are taken whole.
    """
    listing = list_metadata(store, metadata_uri)
    buckets = digest_buckets(store, listing, distribute, f"digest {subset} metadata")
    applied = config if subset == UNLABELLED else config.without_rules()

    def select(context: StepContext) -> StepContents:
        ranges = num_ranges([found for objects in listing.values() for found in objects])
        surveys, kept = survey_and_draw(context, applied, metadata_uri, buckets, ranges, distribute)
        plan = TaskPlan(
            plan_files(context, applied, kept),
            write_files,
            distribute,
            loss_budget,
            lambda outputs: shuffle(outputs, config.seed),
            partial(selection_statistics, surveys, kept),
        )
        return run_tasks(context, plan)

    digests = input_digests_of(buckets, metadata_uri)
    spec = StepSpec(store, run_uri, selection_step(subset), asdict(config), digests=digests)
    return run_step(spec, select)


def survey_and_draw(
    context: StepContext,
    config: SelectionConfig,
    metadata_uri: str,
    buckets: Sequence[Bucket],
    ranges: int,
    distribute: Distribute,
) -> tuple[list[Commit], list[Commit]]:
    """What each bucket holds that may be drawn, and what is drawn of it."""
    aside, rules = (
        replace(context, step=f"{context.step}/{SCRATCH_FOLDER}"),
        Rules(config.seed, config.filters),
    )
    committed = committed_tasks(aside)
    to_survey = {each.name: SurveyTask(aside, rules, each, ranges) for each in buckets}
    surveys = commit_each(committed, to_survey, survey_bucket, distribute, "survey the buckets")
    require_eligible(metadata_uri, surveys)
    drawn = draw(aside, surveys, metadata_uri, config.budget_ms, distribute)
    tasks = [
        DrawnTask(aside, rules, drawn.last_priority, bucket, number, drawn.duplicates[number])
        for number, bucket in enumerate(buckets)
    ]
    to_draw = {task.name: task for task in tasks}
    kept = commit_each(committed, to_draw, keep_drawn, distribute, "draw from the buckets")
    return surveys, kept


def plan_files(
    context: StepContext, config: SelectionConfig, kept: Sequence[Commit]
) -> dict[str, FilesTask]:
    """One task per group of neighbouring buckets, large enough for files of nearly one length."""
    groups = group_buckets([commit.tally_out.duration_ms for commit in kept], config.file_hours)
    tasks = [
        FilesTask(
            context,
            f"group-{number:05d}",
            config.file_hours,
            tuple(kept[each] for each in group),
        )
        for number, group in enumerate(groups)
    ]
    return {task.name: task for task in tasks}


def shuffle(outputs: Sequence[Output], seed: int) -> list[Output]:
    """The files in a seeded random order: the outer level of the hierarchical shuffle (IV-A2)."""
    return [outputs[index] for index in shuffled_order(len(outputs), seed, "files")]


def metadata_uri(corpus_uri: str, subset: str) -> str:
    """Where the metadata of a subset lies in a corpus."""
    return join_uri(corpus_uri, METADATA_FOLDER, subset)
