"""Index a speaker bucket: the hashes and durations of its eligible records."""

from array import array
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64

from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.sampling import sampling_priority, within_speaker_cap
from pipeline.steps.range_merge import gathering, put_extents
from pipeline.steps.selection.buckets import Bucket
from pipeline.steps.selection.hash_ranges import cut_into_ranges
from pipeline.steps.selection.record_rules import Filtered, RecordRules


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
        return gathering(self.bucket.name)


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
        records.priorities[kept],
        records.durations_ms[kept],
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
        ledger=None,
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
        quarantined = array("q")
        rejected: dict[str, Any] = defaultdict(lambda: array("q"))
        for found in task.rules.apply(task.context.store, task.bucket):
            if isinstance(found, Quarantined):
                quarantined.append(found.duration_ms)
                continue
            if isinstance(found, Filtered):
                rejected[found.rule].append(found.record.duration_ms)
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
            _tally(np.array(quarantined, np.int64)),
            {name: _tally(np.array(rejected[name], np.int64)) for name in sorted(rejected)},
        )


def _tally(durations_ms: Int64[np.ndarray, " _utterances"]) -> Tally:
    return Tally(len(durations_ms), int(durations_ms.sum()))
