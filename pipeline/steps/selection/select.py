"""Select data: hours sampled uniformly, whole speakers in nearly equal files (003 IV-B1).

The metadata objects of one speaker bucket hold all utterances of its speakers, so a task that
reads whole buckets can write whole speakers. The passes: digest the metadata; index each bucket;
compare all buckets, range by range of hashes, to find duplicates and the cutoff of the budget;
select from each bucket up to the cutoff, in stream order; pack whole speakers of neighbouring
buckets into files; index all by utterance id.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from infra.settings import plain
from infra.store.object_store import ObjectStore, join_uri
from pipeline.filters import SelectionFilters
from pipeline.packing import MAX_IMBALANCE, group_buckets, pack_speakers
from pipeline.records import Quarantined, Tally, parse_utterance, stream_order
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import (
    Distribute,
    LossWatch,
    ScratchTasks,
    Statistics,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.increment import read_bases
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import (
    LEDGER_SUFFIX,
    METADATA_FOLDER,
    SELECTED_PREFIX,
    UNLABELLED,
    selection_step,
)
from pipeline.sampling import hash_name, within_speaker_cap
from pipeline.settings import SelectionConfig
from pipeline.shuffling import shuffle
from pipeline.steps.hash_ranges import Gathered
from pipeline.steps.selection.buckets import (
    NOTHING_INGESTED,
    Bucket,
    Eligible,
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
    SIZES,
    ExtendedSelection,
    extended_selection,
    find_selected_before,
    metadata_to_read,
    sizes,
    tallies_by_name,
    with_hours,
)
from pipeline.steps.selection.subset_overlap import require_disjoint


@dataclass(frozen=True, slots=True)
class SelectTask:
    """A bucket, its number among all, and the duplicates that buckets leave to others.

    An increment's bucket leaves to earlier runs what they have selected `before`, an extent of ids
    a bucket. It meets these where they were if all metadata `is_read_again`.
    """

    context: StepContext
    rules: RecordRules
    last_priority: int
    bucket: Bucket
    number: int
    duplicates: Gathered
    before: Gathered | None
    is_read_again: bool

    @property
    def name(self) -> str:
        """The task's name, which differs from that of the bucket's index."""
        return f"{SELECTED_PREFIX}{self.bucket.name}"


@once
def select_bucket(task: SelectTask) -> Commit:
    """Apply the rules as the bucket's index did; store the records up to the last priority."""
    # A duplicate of an earlier bucket is quarantined even where the budget leaves it out.
    elsewhere = read_hashes(task.duplicates.read(task.number))
    before = read_hashes(task.before.read(task.number)) if task.before else frozenset[int]()
    candidates: list[Eligible] = []
    quarantined: list[Quarantined] = []
    left_ms: list[int] = []
    for found in task.rules.apply(task.context.store, task.bucket):
        if isinstance(found, Quarantined):
            quarantined.append(found)
            continue
        if isinstance(found, Eligible):
            is_elsewhere = found.priority in elsewhere
            if before and not is_elsewhere and hash_name(found.record.utterance_id) in before:
                # Judged again with all others, it is not new; a new record of its id is one too
                # many.
                if not task.is_read_again:
                    whose = "an utterance that an earlier run selected"
                    quarantined.append(found.as_duplicate(whose))
                continue
            if is_elsewhere or found.priority <= task.last_priority:
                candidates.append(found)
                continue
        left_ms.append(found.record.duration_ms)
    selected = []
    # Only lower priorities decide, and those are candidates too: the index kept the same ones.
    numbers: dict[str, int] = {}
    speakers = [numbers.setdefault(each.record.speaker_id, len(numbers)) for each in candidates]
    is_kept = within_speaker_cap(
        np.array(speakers, np.uint64),
        np.array([each.priority for each in candidates], np.uint64),
        np.array([each.record.duration_ms for each in candidates], np.int64),
        task.rules.filters.max_speaker_ms,
    )
    for candidate, kept in zip(candidates, is_kept, strict=True):
        if not kept:
            left_ms.append(candidate.record.duration_ms)
        elif candidate.priority in elsewhere:
            quarantined.append(candidate.as_duplicate())
        else:
            selected.append(candidate.record)
    selected.sort(key=stream_order)
    unselected = Tally(len(left_ms), sum(left_ms))
    data = "".join(utterance.to_json() + "\n" for utterance in selected).encode()
    output = task.context.put_output(task.name, ".jsonl", data, Tally.of(selected))
    lost = Tally.of(quarantined)
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=(output,),
        ledger=task.context.put_ledger(task.name, quarantined),
        tally_in=output.tally + unselected + lost,
        quarantined=lost,
        unselected=unselected,
    )
    return task.context.commit(record)


@dataclass(frozen=True, slots=True)
class PackTask:
    """PackTask holds the commits of neighbouring buckets, whose speakers are packed together."""

    context: StepContext
    name: str
    file_hours: float
    selected: tuple[Commit, ...]


@once
def pack_files(task: PackTask) -> Commit:
    """Pack speakers into files, and join the buckets' ledgers."""
    lines = defaultdict[str, list[bytes]](list)
    durations_ms = Counter[str]()
    for output in chain.from_iterable(commit.outputs for commit in task.selected):
        for line in task.context.read(output).splitlines(keepends=True):
            utterance = parse_utterance(line.decode())
            # The lines are in stream order already, as the causal mean needs them.
            lines[utterance.speaker_id].append(line)
            durations_ms[utterance.speaker_id] += utterance.duration_ms
    # Only neighbouring buckets are packed together, which spares a shuffle of all speakers (IV-A2).
    packed = pack_speakers(durations_ms, task.file_hours)
    alone_ms = {file[0]: durations_ms[file[0]] for file in packed if len(file) == 1}
    outputs = []
    for number, speakers in enumerate(packed):
        some = [line for speaker in speakers for line in lines[speaker]]
        tally = Tally(len(some), sum(durations_ms[speaker] for speaker in speakers))
        name = f"{task.name}-{number:05d}"
        outputs.append(task.context.put_output(name, ".jsonl", b"".join(some), tally))
    quarantined = sum((commit.quarantined for commit in task.selected), Tally())
    ledger = None
    if ledgers := [commit.ledger for commit in task.selected if commit.ledger]:
        data = b"".join(map(task.context.read, ledgers))
        stored = task.context.put_output(task.name, LEDGER_SUFFIX, data, quarantined)
        ledger = replace(stored, reasons=dict(ledger_reasons(ledgers)))
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=tuple(outputs),
        ledger=ledger,
        tally_in=sum((commit.tally_in for commit in task.selected), Tally()),
        quarantined=quarantined,
        unselected=sum((commit.unselected for commit in task.selected), Tally()),
        statistics={"alone_ms": alone_ms},
    )
    return task.context.commit(record)


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
    name, settings, may_grow = selection_step(subset), plain(config), subset == UNLABELLED
    extended = extended_selection(store, run_uri, name, settings) if may_grow else None
    applied = config
    if not may_grow:
        applied = replace(config, hours=0.0, filters=SelectionFilters(), date_folders=False)
    listing = list_metadata(store, metadata_uri, ingested)
    if applied.date_folders:
        filters, may_be_none = applied.filters, extended is not None
        listing = within_dates(listing, metadata_uri, filters, may_be_none=may_be_none)
    if extended is not None:
        listing = metadata_to_read(store, run_uri, metadata_uri, listing, extended, applied)
    # Digests go into the fingerprint, so a finished step is found without parsing a record.
    buckets = digest_buckets(store, listing, distribute, f"digest {subset} metadata")

    def select(step: StepRun) -> Manifest:
        read: dict[str, Any] = {SIZES: sizes(listing, metadata_uri)} if may_grow else {}
        if extended and not buckets:
            return step.lossless(Tally(), statistics=read)
        ranges = num_ranges([found for objects in listing.values() for found in objects])
        scratch = ScratchTasks(step.context, distribute)
        indexes, selected, last_priority = select_records(
            scratch, applied, metadata_uri, buckets, ranges, loss_budget, extended
        )
        plan = TaskPlan(
            plan_files(step.context, applied, selected),
            pack_files,
            distribute,
            loss_budget,
            fold=fold_alone,
            order=partial(shuffle, seed=config.seed),
        )
        made = run_tasks(step, plan)
        corpus_uri = metadata_uri.removesuffix(f"/{METADATA_FOLDER}/{subset}")
        has_base = may_grow and bool(read_bases(store, run_uri).runs)
        require_disjoint(step.context, corpus_uri, subset, distribute, has_base=has_base)
        index = index_ids(scratch, step.context, buckets, made, ranges)
        read |= {LAST_PRIORITY: f"{last_priority:016x}"} if applied.hours else {}
        statistics = {
            "files": file_statistics(made, made.statistics["alone_ms"]),
            "unselected": unselected_statistics(indexes, selected),
            **read,
        }
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


def select_records(
    scratch: ScratchTasks,
    config: SelectionConfig,
    metadata_uri: str,
    buckets: Sequence[Bucket],
    ranges: int,
    loss_budget: float,
    extended: ExtendedSelection | None,
) -> tuple[list[Commit], list[Commit], int]:
    """Index each bucket, find the cutoff, and select from each bucket.

    Returns the commits of both passes, by bucket, and the last priority. An increment leaves out
    what the runs before it have selected. The manifest does not name the objects of these tasks:
    once it exists, they may be removed.
    """
    rules = RecordRules(config.seed, config.filters)
    indexing = [IndexTask(scratch.context, rules, each, ranges) for each in buckets]
    # A bucket's index keeps 12 bytes of a candidate; the records stay in the store.
    indexes = scratch.run(indexing, index_bucket, "index the buckets")
    num_records = sum(index.tally_in.utterances for index in indexes)
    # Of an increment's few records no filter need let one pass.
    if extended is None:
        require_eligible(metadata_uri, indexes, num_records)
    # The cutoff meets the budget exactly, in place of the paper's mild oversampling (003 IV-B1).
    budget_ms = 0 if extended and extended.keeps_share else config.budget_ms
    last, duplicates = find_cutoff(scratch, indexes, ranges, metadata_uri, budget_ms)
    before, is_read_again = None, extended is not None and extended.is_read_again
    if extended is not None:
        if extended.keeps_share:
            # The base's cutoff takes the same share of new records, and so of the union.
            last = extended.last_priority
        hashed = hash_buckets(scratch, buckets, ranges)
        step = extended.base.manifest.step
        before = find_selected_before(scratch, extended.bases, step, hashed, ranges)
    # This pass judges again, 9 us a record, as kept records would need 500 bytes each.
    left = duplicates, before, is_read_again
    tasks = [
        SelectTask(scratch.context, rules, last, bucket, number, *left)
        for number, bucket in enumerate(buckets)
    ]
    # The buckets with most bad records come first, so that the loss budget ends the pass early.
    worst_first = sorted(tasks, key=lambda task: -indexes[task.number].quarantined.utterances)
    watch = LossWatch(loss_budget, num_records)
    selected = scratch.run(worst_first, select_bucket, "select from the buckets", watch)
    by_name = {commit.task: commit for commit in selected}
    return indexes, [by_name[task.name] for task in tasks], last


def require_eligible(metadata_uri: str, indexes: Sequence[Commit], num_records: int) -> None:
    """Raise ValueError for metadata without a record, and for filters that let none pass."""
    if not num_records:
        raise ValueError(f"{metadata_uri} holds no record: its objects are empty; ingest again")
    left_out = tallies_by_name(index.statistics["unselected"] for index in indexes)
    if left_out and not any(index.tally_out.utterances for index in indexes):
        counts = {reason: tally.utterances for reason, tally in left_out.items()}
        raise ValueError(
            f"{metadata_uri}: the filters leave none of {num_records} records (left out "
            f"by {counts}): loosen selection.filters"
        )


def plan_files(
    context: StepContext, config: SelectionConfig, selected: Sequence[Commit]
) -> dict[str, PackTask]:
    """Plan a task for each group of neighbouring buckets, large enough for nearly equal files."""
    groups = group_buckets([commit.tally_out.duration_ms for commit in selected], config.file_hours)
    tasks = {}
    for number, group in enumerate(groups):
        name = f"group-{number:05d}"
        commits = tuple(selected[each] for each in group)
        tasks[name] = PackTask(context, name, config.file_hours, commits)
    return tasks


def fold_alone(groups: Sequence[Statistics]) -> Statistics:
    """Join the durations of the speakers who are alone in a file."""
    return {"alone_ms": {name: ms for each in groups for name, ms in each["alone_ms"].items()}}


def file_statistics(files: Manifest, alone_ms: Mapping[str, int]) -> dict[str, Any]:
    """Count the files, and compare them with their mean.

    The `imbalance` is that of the longest. The `lone_speakers` alone exceed 1.05 times the mean.
    """
    mean_ms = files.tally_out.duration_ms / max(1, len(files.outputs))
    longest_ms = max((output.duration_ms for output in files.outputs), default=0)
    lone = (name for name, duration_ms in alone_ms.items() if duration_ms > MAX_IMBALANCE * mean_ms)
    return {
        "num_files": len(files.outputs),
        "mean_hours": round(mean_ms / 3_600_000, 6),
        "imbalance": round(longest_ms / mean_ms, 6) if mean_ms else 1.0,
        "lone_speakers": sorted(lone),
    }


def unselected_statistics(
    indexes: Sequence[Commit], selected: Sequence[Commit]
) -> dict[str, dict[str, Any]]:
    """Add up what was left out, by reason; what no filter or cap left out is over budget."""
    unselected = tallies_by_name(index.statistics["unselected"] for index in indexes)
    known = sum(unselected.values(), Tally())
    total = sum((commit.unselected for commit in selected), Tally())
    unselected["over_budget"] = Tally(
        total.utterances - known.utterances, total.duration_ms - known.duration_ms
    )
    return with_hours(unselected)


def metadata_uri(corpus_uri: str, subset: str) -> str:
    """Return the URI of a subset's metadata in a corpus."""
    return join_uri(corpus_uri, METADATA_FOLDER, subset)
