"""Find duplicates across all speaker buckets, and the cutoff of the hours budget (003 IV-B1).

Each bucket is indexed: the hashes and durations of its eligible records. Then one range of hashes
at a time is compared across all buckets: duplicates, speakers in several buckets, and the hours by
range of priorities. From these the driver finds the priority up to which utterances are selected.
It never sees an utterance.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from infra.store.object_store import ObjectInfo
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import Distribute, ScratchTasks
from pipeline.runs.manifest import Output
from pipeline.sampling import NUM_PRIORITIES, last_priority, sampling_priority, within_speaker_cap
from pipeline.steps.hash_ranges import (
    Gathered,
    HashRange,
    cut_into_ranges,
    gathered_objects,
    put_extents,
    utterances_of,
)
from pipeline.steps.selection.buckets import Bucket, Filtered, RecordRules


@dataclass(frozen=True, slots=True)
class IndexTask:
    """One speaker bucket to index, in `num_ranges` ranges of hashes."""

    context: StepContext
    rules: RecordRules
    bucket: Bucket
    num_ranges: int

    @property
    def name(self) -> str:
        """The task's name."""
        return f"gathered-{self.bucket.name}"


@once
def index_bucket(task: IndexTask) -> Commit:
    """Store the hashes of a bucket's eligible records: one object, range by range."""
    records = _BucketRecords.of(task)
    # The cap asks a speaker's lower priorities alone, so a later pass repeats its answer.
    kept = within_speaker_cap(
        records.speakers,
        records.priorities,
        records.durations_ms,
        task.rules.filters.max_speaker_ms,
    )
    over_cap = _tally(records.durations_ms[~kept])
    ranges = cut_into_ranges(
        utterances_of(records.priorities[kept], records.durations_ms[kept]),
        # Of a speaker whom filters and cap leave nothing, no stream is in two files.
        records.speaker_hashes[np.unique(records.speakers[kept]).astype(np.int64)],
        task.num_ranges,
    )
    rejected = records.rejected | ({"max_speaker_hours": over_cap} if over_cap.utterances else {})
    unselected = sum(rejected.values(), Tally())
    eligible = _tally(records.durations_ms[kept])
    data = (part.to_bytes() for part in ranges)
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=(put_extents(task.context, task.name, ".hashes", data, eligible),),
        tally_in=eligible + records.quarantined + unselected,
        quarantined=records.quarantined,
        unselected=unselected,
        statistics={"unselected": {reason: asdict(each) for reason, each in rejected.items()}},
    )
    return task.context.commit(record)


@dataclass(frozen=True, slots=True)
class _BucketRecords:
    """The records of a bucket that pass the rules, as columns, and tallies of the others."""

    priorities: UInt64[np.ndarray, " utterances"]
    durations_ms: Int64[np.ndarray, " utterances"]
    speakers: UInt64[np.ndarray, " utterances"]
    speaker_hashes: UInt64[np.ndarray, " _speakers"]
    quarantined: Tally
    rejected: dict[str, Tally]

    @classmethod
    def of(cls, task: IndexTask) -> "_BucketRecords":
        # Plain columns: 24 bytes an utterance, where objects would take 500.
        priorities, durations_ms, owners = array("Q"), array("q"), array("Q")
        numbers: dict[str, int] = {}
        quarantined, rejected = Tally(), defaultdict[str, Tally](Tally)
        for found in task.rules.apply(task.context.store, task.bucket):
            if isinstance(found, Quarantined):
                quarantined += Tally(1, found.duration_ms)
                continue
            if isinstance(found, Filtered):
                rejected[found.rule] += Tally(1, found.record.duration_ms)
                continue
            priorities.append(found.priority)
            durations_ms.append(found.record.duration_ms)
            owners.append(numbers.setdefault(found.record.speaker_id, len(numbers)))
        hashes = [sampling_priority(task.rules.seed, name) for name in numbers]
        return cls(
            np.array(priorities, np.uint64),
            np.array(durations_ms, np.int64),
            np.array(owners, np.uint64),
            np.array(hashes, np.uint64),
            quarantined,
            dict(sorted(rejected.items())),
        )


def _tally(durations_ms: Int64[np.ndarray, " _utterances"]) -> Tally:
    return Tally(len(durations_ms), int(durations_ms.sum()))


@dataclass(frozen=True, slots=True)
class RangeTask:
    """One range, and the hashes of all buckets in their order."""

    number: int
    hashes: Gathered


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """A range's duration without duplicates, and its duplicates, if any: an extent a bucket."""

    duration_ms: int
    num_split_speakers: int
    duplicates: Output | None


def compare_buckets(task: RangeTask) -> RangeSummary:
    """Find the utterances and speakers of a range that are in more than one bucket.

    Of several buckets with an utterance id the first keeps it.
    """
    merged = _Merged.of(task)
    spare = merged.is_duplicate
    duplicates = None
    if spare.any():
        extents = hashes_by_bucket(
            merged.priorities[spare], merged.buckets[spare], len(task.hashes.objects)
        )
        tally = _tally(merged.durations_ms[spare])
        name = f"duplicates-in-{task.number:05d}"
        duplicates = put_extents(task.hashes.context, name, ".duplicates", extents, tally)
    duration_ms = int(merged.durations_ms[~spare].sum())
    return RangeSummary(duration_ms, merged.num_split_speakers, duplicates)


def find_last_priority(task: tuple[RangeTask, int]) -> int:
    """Find the priority at which a range meets a budget in milliseconds."""
    hash_range, budget_ms = task
    merged = _Merged.of(hash_range)
    # A duplicate must not fill the budget a second time.
    kept = ~merged.is_duplicate
    return last_priority(merged.priorities[kept], merged.durations_ms[kept], budget_ms)


def hashes_by_bucket(
    hashes: UInt64[np.ndarray, " rows"], buckets: Int64[np.ndarray, " rows"], num_buckets: int
) -> list[bytes]:
    """Write the hashes of each bucket by themselves, 8 bytes each: no bucket reads another's."""
    order = np.argsort(buckets, kind="stable")
    edges = np.searchsorted(buckets[order], np.arange(1, num_buckets))
    return [some.astype("<u8").tobytes() for some in np.split(hashes[order], edges)]


def read_hashes(extents: Iterable[bytes]) -> frozenset[int]:
    """Read the hashes of one bucket from all ranges, as `hashes_by_bucket` wrote them."""
    return frozenset[int]().union(*(np.frombuffer(data, "<u8").tolist() for data in extents))


@dataclass(frozen=True, slots=True)
class _Merged:
    """A range of all buckets by rising priority; equal ones are in the order of the buckets."""

    priorities: UInt64[np.ndarray, " utterances"]
    durations_ms: Int64[np.ndarray, " utterances"]
    buckets: Int64[np.ndarray, " utterances"]
    num_split_speakers: int

    @classmethod
    def of(cls, task: RangeTask) -> "_Merged":
        parts = list(map(HashRange.from_bytes, task.hashes.read(task.number)))
        utterances = np.concatenate([part.utterances for part in parts])
        # The stable sort keeps equal ids in the order of buckets, so the first bucket wins.
        order = np.argsort(utterances["priority"], kind="stable")
        utterances = utterances[order]
        lengths = [len(part.utterances) for part in parts]
        # A bucket lists each speaker once, so a count above 1 is a split speaker.
        _, num_buckets_of = np.unique(
            np.concatenate([part.speakers for part in parts]), return_counts=True
        )
        return cls(
            utterances["priority"],
            utterances["duration_ms"].astype(np.int64),
            np.repeat(np.arange(len(parts)), lengths)[order],
            int((num_buckets_of > 1).sum()),
        )

    @property
    def is_duplicate(self) -> Bool[np.ndarray, " utterances"]:
        """Mark the utterances whose id an earlier bucket has."""
        same = np.zeros(len(self.priorities), np.bool_)
        same[1:] = self.priorities[1:] == self.priorities[:-1]
        return same


# A range's task holds some 10 million records, at 70 bytes.
_RANGE_BYTES = 2 * 2**30
_GZIP_RATIO = 8


def num_ranges(objects: Sequence[ObjectInfo]) -> int:
    """Count the ranges in which buckets are compared: one for each 2 GiB of unpacked metadata."""
    sizes = (
        found.num_bytes * (_GZIP_RATIO if found.uri.endswith(".gz") else 1) for found in objects
    )
    return 1 + sum(sizes) // _RANGE_BYTES


def find_cutoff(
    scratch: ScratchTasks,
    indexes: Sequence[Commit],
    num_ranges: int,
    metadata_uri: str,
    budget_ms: int,
) -> tuple[int, Gathered]:
    """Find the priority at which the indexed buckets meet `budget_ms`; 0 selects all.

    Returned with it are the duplicates, an extent for each bucket: the priorities which it leaves
    to earlier buckets.

    ValueError if the buckets hold less, or if a speaker is in two buckets: its stream would be in
    two files.
    """
    hashes = Gathered.of(scratch.context, gathered_objects(indexes), num_ranges)
    tasks = [RangeTask(number, hashes) for number in range(num_ranges)]
    summaries = scratch.distribute(tasks, compare_buckets, "compare the buckets")
    num_split = sum(summary.num_split_speakers for summary in summaries)
    if num_split:
        raise ValueError(
            f"{metadata_uri}: {num_split} speakers have records in several speaker_bucket=..; put "
            "all of a speaker's records into one, as its causal mean needs the whole stream"
        )
    last = _last_priority(tasks, summaries, budget_ms, scratch.distribute)
    found = [summary.duplicates for summary in summaries if summary.duplicates]
    return last, Gathered.of(scratch.context, found, len(indexes))


def _last_priority(
    tasks: Sequence[RangeTask],
    summaries: Sequence[RangeSummary],
    budget_ms: int,
    distribute: Distribute,
) -> int:
    totals_ms = np.cumsum([summary.duration_ms for summary in summaries])
    if budget_ms > totals_ms[-1]:
        hours, budget_hours = totals_ms[-1] / 3.6e6, budget_ms / 3.6e6
        raise ValueError(
            f"budget = {budget_hours:.2f} h: need at most {hours:.2f} h, the eligible hours of the "
            "metadata; 0 selects all"
        )
    if budget_ms == 0:
        return NUM_PRIORITIES - 1
    # Ranges ascend in priority, so the budget is met within exactly one of them.
    met = int(np.searchsorted(totals_ms, budget_ms))
    before_ms = int(totals_ms[met]) - summaries[met].duration_ms
    # That range alone is read again: some 10 million hashes.
    [last] = distribute(
        [(tasks[met], budget_ms - before_ms)], find_last_priority, "find the cutoff"
    )
    return last
