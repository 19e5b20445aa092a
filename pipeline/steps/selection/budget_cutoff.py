"""Find the priority up to which utterances are selected from all buckets (003 IV-B1).

The driver sees hours by range of priorities, never an utterance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.store.object_store import ObjectInfo
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.step import Distribute
from pipeline.sampling import NUM_PRIORITIES
from pipeline.steps.range_merge import Gathered, gathered_objects
from pipeline.steps.selection.deduplicate import (
    RangeSummary,
    RangeTask,
    compare_buckets,
    find_last_priority,
)

# A range's task holds some 10 million records, at 70 bytes.
_RANGE_BYTES = 2 * 2**30
_GZIP_RATIO = 8


@dataclass(frozen=True, slots=True)
class Cutoff:
    """The last priority that is selected, and the duplicates that are not.

    `duplicates` has an extent for each bucket: the priorities which it leaves to earlier buckets.
    """

    last_priority: int
    duplicates: Gathered


def num_ranges(objects: Sequence[ObjectInfo]) -> int:
    """Count the ranges in which buckets are compared: one for each 2 GiB of unpacked metadata."""
    sizes = (
        found.num_bytes * (_GZIP_RATIO if found.uri.endswith(".gz") else 1) for found in objects
    )
    return 1 + sum(sizes) // _RANGE_BYTES


def find_cutoff(
    context: StepContext,
    indexes: Sequence[Commit],
    num_ranges: int,
    metadata_uri: str,
    budget_ms: int,
    distribute: Distribute,
) -> Cutoff:
    """Find the priority at which the indexed buckets meet `budget_ms`; 0 selects all.

    ValueError if the buckets hold less, or if a speaker is in two buckets: its stream would be in
    two files.
    """
    hashes = Gathered.of(context, gathered_objects(indexes), num_ranges)
    tasks = [RangeTask(number, hashes) for number in range(num_ranges)]
    summaries = distribute(tasks, compare_buckets, "compare the buckets")
    num_split = sum(summary.num_split_speakers for summary in summaries)
    if num_split:
        raise ValueError(
            f"{metadata_uri}: {num_split} speakers have records in several speaker_bucket=..; put "
            "all of a speaker's records into one, as its causal mean needs the whole stream"
        )
    last = _last_priority(tasks, summaries, budget_ms, distribute)
    found = [summary.duplicates for summary in summaries if summary.duplicates]
    return Cutoff(last, Gathered.of(context, found, len(indexes)))


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
