"""Select data: hours sampled uniformly, whole speakers in nearly equal files (003 IV-B1).

The metadata objects of one speaker bucket hold all utterances of its speakers, so a task that
reads whole buckets can write whole speakers. The passes: digest the metadata; index each bucket;
compare all buckets, range by range of hashes, to find duplicates and the cutoff of the budget;
select from each bucket; pack the files of neighbouring buckets; index all by utterance id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from infra.configuration import LATER, plain
from infra.ranges import Range, Seed, check_ranges
from infra.store.object_store import ObjectInfo, ObjectStore, join_uri
from pipeline.filters import SelectionFilters
from pipeline.packing import group_buckets
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, committed_tasks
from pipeline.runs.ledger import LossLimit
from pipeline.runs.loss_watch import LossWatch
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
from pipeline.shuffling import shuffle
from pipeline.steps.increments.new_metadata import (
    LAST_PRIORITY,
    SIZES,
    ExtendedSelection,
    extended_selection,
    metadata_to_read,
    sizes,
)
from pipeline.steps.increments.selected_before import (
    NOTHING_BEFORE,
    SelectedBefore,
    find_selected_before,
)
from pipeline.steps.selection.buckets import (
    NOTHING_INGESTED,
    Bucket,
    digest_buckets,
    input_digests_of,
    list_metadata,
    within_dates,
)
from pipeline.steps.selection.budget_cutoff import find_cutoff, num_ranges
from pipeline.steps.selection.id_index import hash_buckets, index_ids
from pipeline.steps.selection.index_bucket import IndexTask, index_bucket
from pipeline.steps.selection.pack_files import PackTask, pack_files
from pipeline.steps.selection.record_rules import RecordRules
from pipeline.steps.selection.select_bucket import SelectTask, select_bucket
from pipeline.steps.selection.statistics import (
    require_eligible,
    selection_statistics,
    union_statistics,
    unread_statistics,
)
from pipeline.steps.selection.subset_overlap import require_disjoint


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """`hours` to select from the unlabelled metadata (0 = all), in files of `file_hours`.

    `filters` are for the unlabelled metadata too; they come before the budget. With `date_folders`
    the folder `date=...` of a metadata object is the day of its records, UTC, so that objects of
    days outside the filters' dates are not read.
    """

    # Fewer hours than 2e-7 round to 0 ms, which selects all.
    hours: Annotated[float, Range(2e-7, 1e9, zero="all")]
    file_hours: Annotated[float, Range(1e-6, 1000)]
    seed: Seed
    filters: SelectionFilters = field(default_factory=SelectionFilters)
    date_folders: bool = field(default=False, metadata=LATER)

    __post_init__ = check_ranges

    @property
    def budget_ms(self) -> int:
        """The budget in milliseconds; 0 selects all."""
        return round(self.hours * 3_600_000)

    def without_rules(self) -> "SelectionConfig":
        """Return the configuration that takes all utterances, in the same files."""
        return replace(self, hours=0.0, filters=SelectionFilters(), date_folders=False)


def select_utterances(
    store: ObjectStore,
    run_uri: str,
    subset: str,
    metadata_uri: str,
    config: SelectionConfig,
    loss_budget: float,
    distribute: Distribute,
    ingested: Mapping[str, int] = NOTHING_INGESTED,
) -> StepResult:
    """Select the utterances of one subset; ValueError if the listing lacks what was `ingested`.

    The budget of hours and the filters hold for the unlabelled subset; the others are selected
    whole. ValueError if another subset's selection in this run has an utterance, a speaker or audio
    of this one. An increment selects from the unlabelled metadata that no run before it has read.
    """
    applied = config if subset == UNLABELLED else config.without_rules()
    step, settings, may_grow = selection_step(subset), plain(config), subset == UNLABELLED
    extended = extended_selection(store, run_uri, step, settings) if may_grow else None
    everything = list_metadata(store, metadata_uri, ingested)
    listing = listing_to_read(store, run_uri, metadata_uri, everything, applied, extended)
    # Digests go into the fingerprint, so a finished step is found without parsing a record.
    buckets = digest_buckets(store, listing, distribute, f"digest {subset} metadata")

    def select(context: StepContext) -> StepContents:
        read: dict[str, Any] = {SIZES: sizes(listing, metadata_uri)} if may_grow else {}
        if extended and not buckets:
            return extend(extended, context, StepContents.of_all(Tally(), statistics=read))
        ranges = num_ranges([found for objects in listing.values() for found in objects])
        scratch = replace(context, step=f"{context.step}/{SCRATCH_FOLDER}")
        committed = committed_tasks(scratch)
        place = metadata_uri, buckets, ranges, loss_budget, distribute
        records = select_records(scratch, committed, applied, *place, extended)
        plan = TaskPlan(
            plan_files(context, applied, records.selected),
            pack_files,
            distribute,
            loss_budget,
            lambda outputs: shuffle(outputs, config.seed),
            partial(selection_statistics, records.indexes, records.selected),
        )
        contents = run_tasks(context, plan)
        corpus_uri = metadata_uri.removesuffix(f"/{METADATA_FOLDER}/{subset}")
        is_increment = extended is not None
        require_disjoint(context, corpus_uri, subset, distribute, is_increment=is_increment)
        index = index_ids(scratch, committed, context, buckets, contents, ranges, distribute)
        read |= {LAST_PRIORITY: records.last_priority} if applied.hours else {}
        statistics = {**contents.statistics, **unread_statistics(everything, listing), **read}
        contents = replace(contents, statistics=statistics, id_index=index)
        return extend(extended, context, contents) if extended else contents

    digests = input_digests_of(buckets, metadata_uri) | (extended.base.digests if extended else {})
    return run_step(StepSpec(store, run_uri, step, settings, digests=digests), select)


def listing_to_read(
    store: ObjectStore,
    run_uri: str,
    metadata_uri: str,
    everything: dict[str, list[ObjectInfo]],
    config: SelectionConfig,
    extended: ExtendedSelection | None,
) -> dict[str, list[ObjectInfo]]:
    """Leave out the metadata of other days, and what the runs before an increment have read."""
    listing = everything
    if config.date_folders:
        listing = within_dates(everything, config.filters, may_be_none=extended is not None)
    if extended is None:
        return listing
    return metadata_to_read(store, run_uri, metadata_uri, listing, extended)


def extend(extended: ExtendedSelection, context: StepContext, own: StepContents) -> StepContents:
    """Join an increment's selection with all that the runs before it have selected."""
    before = extended.base.manifest
    own = replace(own, statistics=union_statistics(before, own.statistics))
    if extended.is_read_again:
        return extended.base.selected_again(context, own)
    if LAST_PRIORITY in before.statistics:
        last = {LAST_PRIORITY: extended.last_priority}
        own = replace(own, statistics={**own.statistics, **last})
    return extended.base.extended_by(context, own)


@dataclass(frozen=True, slots=True)
class SelectedRecords:
    """SelectedRecords holds the commits of both passes, by bucket, and the last priority."""

    indexes: list[Commit]
    selected: list[Commit]
    last_priority: int


def select_records(
    scratch: StepContext,
    committed: Mapping[str, Commit],
    config: SelectionConfig,
    metadata_uri: str,
    buckets: Sequence[Bucket],
    ranges: int,
    loss_budget: float,
    distribute: Distribute,
    extended: ExtendedSelection | None = None,
) -> SelectedRecords:
    """Index each bucket, find the cutoff, and select from each bucket.

    An increment leaves out what the runs before it have selected. Tasks write below `scratch/` in
    the step's folder, unless they are `committed`. The manifest does not name those objects: once
    it exists, they may be removed.
    """
    rules = RecordRules(config.seed, config.filters)
    indexing = [IndexTask(scratch, rules, each, ranges) for each in buckets]
    to_index = {task.name: task for task in indexing}
    # A bucket's index keeps 12 bytes of a candidate; the records stay in the store.
    indexes = commit_each(committed, to_index, index_bucket, distribute, "index the buckets")
    # Of an increment's few records no filter need let one pass.
    if extended is None:
        require_eligible(metadata_uri, indexes)
    has_share = extended is not None and extended.keeps_share
    # The cutoff meets the budget exactly, in place of the paper's mild oversampling (003 IV-B1).
    budget_ms = 0 if has_share else config.budget_ms
    cutoff = find_cutoff(scratch, indexes, ranges, metadata_uri, budget_ms, distribute)
    # The base's cutoff takes the same share of new records, and so of the union.
    last = extended.last_priority if extended and has_share else cutoff.last_priority
    before = _selected_before(scratch, committed, buckets, ranges, distribute, extended)
    # This pass judges again, 9 us a record, as kept records would need 500 bytes each.
    tasks = [
        SelectTask(scratch, rules, last, bucket, number, cutoff.duplicates, before)
        for number, bucket in enumerate(buckets)
    ]
    # The buckets with most bad records come first, so that the loss budget ends the pass early.
    worst_first = sorted(tasks, key=lambda task: -indexes[task.number].quarantined.utterances)
    to_select = {task.name: task for task in worst_first}
    num_records = sum(index.tally_in.utterances for index in indexes)
    watch = LossWatch(scratch, LossLimit(loss_budget, num_records))
    description = "select from the buckets"
    selected = commit_each(committed, to_select, select_bucket, distribute, description, watch)
    by_name = {commit.task: commit for commit in selected}
    return SelectedRecords(indexes, [by_name[task.name] for task in tasks], last)


def _selected_before(
    scratch: StepContext,
    committed: Mapping[str, Commit],
    buckets: Sequence[Bucket],
    ranges: int,
    distribute: Distribute,
    extended: ExtendedSelection | None,
) -> SelectedBefore:
    """Look for the ids of each bucket that the runs before an increment have selected."""
    if extended is None:
        return NOTHING_BEFORE
    hashed = hash_buckets(scratch, committed, buckets, ranges, distribute)
    chain = extended.bases, extended.base.manifest.step
    found = find_selected_before(scratch, *chain, hashed, ranges, distribute)
    return SelectedBefore(found, extended.is_read_again)


def plan_files(
    context: StepContext, config: SelectionConfig, selected: Sequence[Commit]
) -> dict[str, PackTask]:
    """Plan a task for each group of neighbouring buckets, large enough for nearly equal files."""
    groups = group_buckets([commit.tally_out.duration_ms for commit in selected], config.file_hours)
    tasks = [
        PackTask(
            context,
            f"group-{number:05d}",
            config.file_hours,
            tuple(selected[each] for each in group),
        )
        for number, group in enumerate(groups)
    ]
    return {task.name: task for task in tasks}


def metadata_uri(corpus_uri: str, subset: str) -> str:
    """Return the URI of a subset's metadata in a corpus."""
    return join_uri(corpus_uri, METADATA_FOLDER, subset)
