"""Select data: hours sampled uniformly, whole speakers in nearly equal files (003 IV-B1).

The metadata objects of one speaker bucket hold all utterances of its speakers, so a task that
reads whole buckets can write whole speakers. The passes: digest the metadata; index each bucket;
compare all buckets, range by range of hashes, to find duplicates and the cutoff of the budget;
select from each bucket up to the cutoff, in stream order; pack whole speakers of neighbouring
buckets into files; index all by utterance id.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeGuard

import numpy as np
from jaxtyping import Bool

from infra.settings import LATER, Range, Seed, check_ranges, plain
from infra.store.object_store import ObjectInfo, ObjectStore, join_uri
from pipeline.filters import SelectionFilters
from pipeline.packing import Balance, group_buckets, pack_speakers
from pipeline.records import Quarantined, Tally, Utterance, parse_utterance, stream_order
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import (
    Distribute,
    LossLimit,
    LossWatch,
    ScratchTasks,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import Manifest, Output, read_output
from pipeline.runs.names import LEDGER_SUFFIX, METADATA_FOLDER, UNLABELLED, selection_step
from pipeline.sampling import hash_name, within_speaker_cap
from pipeline.shuffling import shuffle
from pipeline.steps.hash_ranges import Gathered
from pipeline.steps.selection.buckets import (
    NOTHING_INGESTED,
    Bucket,
    Eligible,
    Filtered,
    RecordRules,
    digest_buckets,
    input_digests_of,
    list_metadata,
    within_dates,
)
from pipeline.steps.selection.deduplicate import (
    IndexTask,
    find_cutoff,
    index_bucket,
    num_ranges,
    read_hashes,
)
from pipeline.steps.selection.id_index import hash_buckets, index_ids
from pipeline.steps.selection.increment import (
    LAST_PRIORITY,
    NOTHING_BEFORE,
    SIZES,
    ExtendedSelection,
    SelectedBefore,
    extended_selection,
    find_selected_before,
    metadata_to_read,
    sizes,
)
from pipeline.steps.selection.statistics import (
    fold_balance,
    require_eligible,
    selection_statistics,
    unread_statistics,
)
from pipeline.steps.selection.subset_overlap import require_disjoint

SELECTED = "selected-"
"""The names of the tasks that select begin so, those of the step's other tasks do not."""


@dataclass(frozen=True, slots=True)
class SelectTask:
    """A bucket, its number among all, and the duplicates that buckets leave to others.

    An increment's bucket leaves to earlier runs what they have selected `before`.
    """

    context: StepContext
    rules: RecordRules
    last_priority: int
    bucket: Bucket
    number: int
    duplicates: Gathered
    before: SelectedBefore = NOTHING_BEFORE

    @property
    def name(self) -> str:
        """The task's name, which differs from that of the bucket's index."""
        return f"{SELECTED}{self.bucket.name}"


@dataclass(frozen=True, slots=True)
class _Selection:
    selected: list[Utterance]
    quarantined: list[Quarantined]
    unselected: Tally


@once
def select_bucket(task: SelectTask) -> Commit:
    """Apply the rules as the bucket's index did; store the records up to the last priority."""
    selection = _apply_cutoff(task)
    selected = sorted(selection.selected, key=stream_order)
    data = "".join(utterance.to_json() + "\n" for utterance in selected).encode()
    output = task.context.put_output(task.name, ".jsonl", data, Tally.of(selected))
    lost = Tally.of(selection.quarantined)
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=(output,),
        ledger=task.context.put_ledger(task.name, selection.quarantined),
        tally_in=output.tally + selection.unselected + lost,
        quarantined=lost,
        unselected=selection.unselected,
        statistics={"months": _months(selected)},
    )
    return task.context.commit(record)


def _apply_cutoff(task: SelectTask) -> _Selection:
    # A duplicate of an earlier bucket is quarantined even where the budget leaves it out.
    elsewhere = read_hashes(task.duplicates.read(task.number))
    before = task.before.read(task.number)
    candidates: list[Eligible] = []
    selected, quarantined, left_ms = [], [], []
    for found in task.rules.apply(task.context.store, task.bucket):
        if isinstance(found, Quarantined):
            quarantined.append(found)
        elif before and _is_before(found, before) and found.priority not in elsewhere:
            # Judged again with all others, it is not new; a new record of its id is one too many.
            if not task.before.is_read_again:
                quarantined.append(found.as_duplicate("an utterance that an earlier run selected"))
        elif isinstance(found, Eligible) and (
            found.priority <= task.last_priority or found.priority in elsewhere
        ):
            candidates.append(found)
        else:
            left_ms.append(found.record.duration_ms)
    is_kept = _within_cap(candidates, task.rules.filters.max_speaker_ms)
    for candidate, kept in zip(candidates, is_kept, strict=True):
        if not kept:
            left_ms.append(candidate.record.duration_ms)
        elif candidate.priority in elsewhere:
            quarantined.append(candidate.as_duplicate())
        else:
            selected.append(candidate.record)
    return _Selection(selected, quarantined, Tally(len(left_ms), sum(left_ms)))


def _is_before(found: Eligible | Filtered, before: frozenset[int]) -> TypeGuard[Eligible]:
    return isinstance(found, Eligible) and hash_name(found.record.utterance_id) in before


def _within_cap(candidates: Sequence[Eligible], cap_ms: int) -> Bool[np.ndarray, " candidates"]:
    # Only lower priorities decide, and those are candidates too: the index kept the same ones.
    numbers: dict[str, int] = {}
    speakers = [numbers.setdefault(each.record.speaker_id, len(numbers)) for each in candidates]
    return within_speaker_cap(
        np.array(speakers, np.uint64),
        np.array([each.priority for each in candidates], np.uint64),
        np.array([each.record.duration_ms for each in candidates], np.int64),
        cap_ms,
    )


def _months(utterances: Sequence[Utterance]) -> dict[str, dict[str, int]]:
    """Tally utterances by month of creation, as written in the records."""
    durations_ms: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for utterance in utterances:
        month = datetime.fromisoformat(utterance.created_at).isoformat()[:7]
        durations_ms[month] += utterance.duration_ms
        counts[month] += 1
    return {month: asdict(Tally(counts[month], durations_ms[month])) for month in sorted(counts)}


@dataclass(frozen=True, slots=True)
class PackTask:
    """PackTask holds the commits of neighbouring buckets, whose speakers are packed together."""

    context: StepContext
    name: str
    file_hours: float
    selected: tuple[Commit, ...]


@dataclass(slots=True)
class _Stream:
    """The lines of a speaker's utterances, in stream order."""

    lines: list[bytes]
    duration_ms: int = 0

    @property
    def tally(self) -> Tally:
        return Tally(len(self.lines), self.duration_ms)


@once
def pack_files(task: PackTask) -> Commit:
    """Pack speakers into files, and join the buckets' ledgers."""
    streams = _read_streams(task)
    durations_ms = {speaker: stream.duration_ms for speaker, stream in streams.items()}
    # Only neighbouring buckets are packed together, which spares a shuffle of all speakers (IV-A2).
    packed = pack_speakers(durations_ms, task.file_hours)
    quarantined = sum((commit.quarantined for commit in task.selected), Tally())
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=tuple(
            _write_file(task, number, [streams[speaker] for speaker in speakers])
            for number, speakers in enumerate(packed)
        ),
        ledger=_join_ledgers(task, quarantined),
        tally_in=sum((commit.tally_in for commit in task.selected), Tally()),
        quarantined=quarantined,
        unselected=sum((commit.unselected for commit in task.selected), Tally()),
        statistics={"balance": Balance.of(packed, durations_ms).to_dict()},
    )
    return task.context.commit(record)


def _read_streams(task: PackTask) -> dict[str, _Stream]:
    streams: dict[str, _Stream] = defaultdict(lambda: _Stream([]))
    for output in (output for commit in task.selected for output in commit.outputs):
        for line in read_output(task.context.store, task.context.run_uri, output).splitlines():
            utterance = parse_utterance(line.decode())
            stream = streams[utterance.speaker_id]
            # The lines are in stream order already, as the causal mean needs them.
            stream.lines.append(line)
            stream.duration_ms += utterance.duration_ms
    return streams


def _write_file(task: PackTask, number: int, streams: Sequence[_Stream]) -> Output:
    data = b"".join(line + b"\n" for stream in streams for line in stream.lines)
    tally = sum((stream.tally for stream in streams), Tally())
    return task.context.put_output(f"{task.name}-{number:05d}", ".jsonl", data, tally)


def _join_ledgers(task: PackTask, quarantined: Tally) -> Output | None:
    if not quarantined.utterances:
        return None
    ledgers = [commit.ledger for commit in task.selected if commit.ledger]
    store, run_uri = task.context.store, task.context.run_uri
    data = b"".join(read_output(store, run_uri, each) for each in ledgers)
    stored = task.context.put_output(task.name, LEDGER_SUFFIX, data, quarantined)
    return replace(stored, reasons=dict(ledger_reasons(ledgers)))


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
    name, settings, may_grow = selection_step(subset), plain(config), subset == UNLABELLED
    extended = extended_selection(store, run_uri, name, settings) if may_grow else None
    everything = list_metadata(store, metadata_uri, ingested)
    listing = listing_to_read(store, run_uri, metadata_uri, everything, applied, extended)
    # Digests go into the fingerprint, so a finished step is found without parsing a record.
    buckets = digest_buckets(store, listing, distribute, f"digest {subset} metadata")

    def select(step: StepRun) -> Manifest:
        read: dict[str, Any] = {SIZES: sizes(listing, metadata_uri)} if may_grow else {}
        if extended and not buckets:
            return step.lossless(Tally(), statistics=read)
        ranges = num_ranges([found for objects in listing.values() for found in objects])
        scratch = ScratchTasks(step.context, distribute)
        records = select_records(
            scratch, applied, metadata_uri, buckets, ranges, loss_budget, extended
        )
        plan = TaskPlan(
            plan_files(step.context, applied, records.selected),
            pack_files,
            distribute,
            loss_budget,
            fold=fold_balance,
            statistics=partial(selection_statistics, records.indexes, records.selected),
            order=partial(shuffle, seed=config.seed),
        )
        made = run_tasks(step, plan)
        corpus_uri = metadata_uri.removesuffix(f"/{METADATA_FOLDER}/{subset}")
        is_increment = extended is not None
        require_disjoint(step.context, corpus_uri, subset, distribute, is_increment=is_increment)
        index = index_ids(scratch, step.context, buckets, made, ranges)
        read |= {LAST_PRIORITY: records.last_priority} if applied.hours else {}
        statistics = {**made.statistics, **unread_statistics(everything, listing), **read}
        return replace(made, statistics=statistics, id_index=index)

    spec = StepSpec(
        store,
        run_uri,
        name,
        settings,
        digests=input_digests_of(buckets, metadata_uri),
        extension=extended.extension if extended else None,
    )
    return run_step(spec, select, base=extended.base if extended else None)


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


@dataclass(frozen=True, slots=True)
class SelectedRecords:
    """SelectedRecords holds the commits of both passes, by bucket, and the last priority."""

    indexes: list[Commit]
    selected: list[Commit]
    last_priority: int


def select_records(
    scratch: ScratchTasks,
    config: SelectionConfig,
    metadata_uri: str,
    buckets: Sequence[Bucket],
    ranges: int,
    loss_budget: float,
    extended: ExtendedSelection | None = None,
) -> SelectedRecords:
    """Index each bucket, find the cutoff, and select from each bucket.

    An increment leaves out what the runs before it have selected. The manifest does not name the
    objects of these tasks: once it exists, they may be removed.
    """
    rules = RecordRules(config.seed, config.filters)
    indexing = [IndexTask(scratch.context, rules, each, ranges) for each in buckets]
    # A bucket's index keeps 12 bytes of a candidate; the records stay in the store.
    indexes = scratch.run(indexing, index_bucket, "index the buckets")
    # Of an increment's few records no filter need let one pass.
    if extended is None:
        require_eligible(metadata_uri, indexes)
    has_share = extended is not None and extended.keeps_share
    # The cutoff meets the budget exactly, in place of the paper's mild oversampling (003 IV-B1).
    budget_ms = 0 if has_share else config.budget_ms
    cutoff = find_cutoff(scratch, indexes, ranges, metadata_uri, budget_ms)
    # The base's cutoff takes the same share of new records, and so of the union.
    last = extended.last_priority if extended and has_share else cutoff.last_priority
    before = _selected_before(scratch, buckets, ranges, extended)
    # This pass judges again, 9 us a record, as kept records would need 500 bytes each.
    tasks = [
        SelectTask(scratch.context, rules, last, bucket, number, cutoff.duplicates, before)
        for number, bucket in enumerate(buckets)
    ]
    # The buckets with most bad records come first, so that the loss budget ends the pass early.
    worst_first = sorted(tasks, key=lambda task: -indexes[task.number].quarantined.utterances)
    num_records = sum(index.tally_in.utterances for index in indexes)
    watch = LossWatch(LossLimit(loss_budget, num_records))
    selected = scratch.run(worst_first, select_bucket, "select from the buckets", watch)
    by_name = {commit.task: commit for commit in selected}
    return SelectedRecords(indexes, [by_name[task.name] for task in tasks], last)


def _selected_before(
    scratch: ScratchTasks,
    buckets: Sequence[Bucket],
    ranges: int,
    extended: ExtendedSelection | None,
) -> SelectedBefore:
    """Look for the ids of each bucket that the runs before an increment have selected."""
    if extended is None:
        return NOTHING_BEFORE
    hashed = hash_buckets(scratch, buckets, ranges)
    step = extended.base.manifest.step
    found = find_selected_before(scratch, extended.bases, step, hashed, ranges)
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
