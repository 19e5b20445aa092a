"""Compare one range of hashes across all buckets: duplicates, split speakers, the cutoff."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from pipeline.records import Tally
from pipeline.runs.manifest import Output
from pipeline.sampling import last_priority
from pipeline.steps.range_merge import Gathered, put_extents
from pipeline.steps.selection.hash_ranges import HashRange


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
) -> Output | None:
    if not len(priorities):
        return None
    name = f"duplicates-in-{task.number:05d}"
    extents = hashes_by_bucket(priorities, buckets, len(task.hashes.objects))
    tally = Tally(len(priorities), int(durations_ms.sum()))
    return put_extents(task.hashes.context, name, ".duplicates", extents, tally)
