"""Compare one range of hashes across all buckets: duplicates, split speakers, the cutoff."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from infra.prefetch import prefetch
from pipeline.records import Tally
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import Output, read_output
from pipeline.sampling import last_priority
from pipeline.steps.selection.hash_ranges import HashRange

_GETS_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True)
class RangeTask:
    """One range, and the object that each bucket wrote of it, in the order of the buckets."""

    context: StepContext
    number: int
    parts: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """A range's duration without duplicates, and its duplicates: an object a bucket with some."""

    duration_ms: int
    num_split_speakers: int
    duplicates: Mapping[int, Output]


def compare_buckets(task: RangeTask) -> RangeSummary:
    """Find the utterances and speakers of a range that are in more than one bucket.

    Of several buckets with an utterance id the first keeps it.
    """
    merged = _Merged.of(task)
    spare = merged.is_duplicate
    return RangeSummary(
        int(merged.durations_ms[~spare].sum()),
        merged.num_split_speakers,
        _put_duplicates(
            task, merged.priorities[spare], merged.durations_ms[spare], merged.buckets[spare]
        ),
    )


def find_last_priority(task: tuple[RangeTask, int]) -> int:
    """Find the priority at which a range meets a budget in milliseconds."""
    hash_range, budget_ms = task
    merged = _Merged.of(hash_range)
    # A duplicate must not fill the budget a second time.
    kept = ~merged.is_duplicate
    return last_priority(merged.priorities[kept], merged.durations_ms[kept], budget_ms)


def read_duplicates(context: StepContext, output: Output) -> frozenset[int]:
    """Read the priorities of a range that a bucket must leave to earlier ones."""
    data = read_output(context.store, context.run_uri, output)
    if len(data) % 8:
        raise ValueError(f"{output.key}: {len(data)} bytes of priorities: need 8 for each")
    return frozenset(np.frombuffer(data, "<u8").tolist())


@dataclass(frozen=True, slots=True)
class _Merged:
    """A range of all buckets by rising priority; equal ones are in the order of the buckets."""

    priorities: UInt64[np.ndarray, " utterances"]
    durations_ms: Int64[np.ndarray, " utterances"]
    buckets: Int64[np.ndarray, " utterances"]
    num_split_speakers: int

    @classmethod
    def of(cls, task: RangeTask) -> "_Merged":
        read = partial(read_output, task.context.store, task.context.run_uri)
        found = prefetch(read, task.parts, _GETS_IN_FLIGHT)
        parts = [HashRange.from_bytes(data) for _, data in found]
        priorities = np.concatenate([part.priorities for part in parts])
        # The stable sort keeps equal ids in the order of buckets, so the first bucket wins.
        order = np.argsort(priorities, kind="stable")
        lengths = [len(part.priorities) for part in parts]
        # A bucket lists each speaker once, so a count above 1 is a split speaker.
        _, num_buckets_of = np.unique(
            np.concatenate([part.speakers for part in parts]), return_counts=True
        )
        return cls(
            priorities[order],
            np.concatenate([part.durations_ms for part in parts])[order],
            np.repeat(np.arange(len(parts)), lengths)[order],
            int((num_buckets_of > 1).sum()),
        )

    @property
    def is_duplicate(self) -> Bool[np.ndarray, " utterances"]:
        """Mark the utterances whose id an earlier bucket has."""
        same = np.zeros(len(self.priorities), np.bool_)
        same[1:] = self.priorities[1:] == self.priorities[:-1]
        return same


def _put_duplicates(
    task: RangeTask,
    priorities: UInt64[np.ndarray, " duplicates"],
    durations_ms: Int64[np.ndarray, " duplicates"],
    buckets: Int64[np.ndarray, " duplicates"],
) -> dict[int, Output]:
    """Store each bucket's duplicates by themselves: in one object, every bucket would read all."""
    stored = {}
    for bucket in np.unique(buckets).tolist():
        rows = buckets == bucket
        tally = Tally(int(rows.sum()), int(durations_ms[rows].sum()))
        name = f"range-{task.number:05d}-of-{bucket:05d}"
        data = priorities[rows].astype("<u8").tobytes()
        stored[bucket] = task.context.put_output(name, ".duplicates", data, tally)
    return stored
