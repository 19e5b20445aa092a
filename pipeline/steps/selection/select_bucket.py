"""Select from one bucket: its utterances up to the cutoff, in stream order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TypeGuard

import numpy as np
from jaxtyping import Bool

from pipeline.records import Quarantined, Tally, Utterance, stream_order
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.sampling import hash_name, within_speaker_cap
from pipeline.steps.increments.selected_before import NOTHING_BEFORE, SelectedBefore
from pipeline.steps.range_merge import Gathered
from pipeline.steps.selection.buckets import Bucket
from pipeline.steps.selection.deduplicate import read_hashes
from pipeline.steps.selection.record_rules import Eligible, Filtered, RecordRules

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
