"""What is drawn of one bucket: its utterances in stream order, kept until they are packed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from pipeline.records import Quarantined, Tally, Utterance, stream_order
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.manifest import Output
from pipeline.sampling import within_speaker_cap
from pipeline.steps.selection.buckets import Bucket
from pipeline.steps.selection.deduplicate import read_duplicates
from pipeline.steps.selection.record_rules import Rules, duplicate


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """A bucket, its place among all, and lists of what it leaves to earlier buckets."""

    context: StepContext
    rules: Rules
    last_priority: int
    bucket: Bucket
    number: int
    duplicates: tuple[Output, ...]

    @property
    def name(self) -> str:
        """Of the task, beside the survey's of the same bucket."""
        return f"drawn-{self.bucket.name}"


class _Candidate(NamedTuple):
    record: Utterance
    priority: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Verdicts:
    selected: list[Utterance]
    quarantined: list[Quarantined]
    unselected: Tally


def keep_drawn(task: DrawnTask) -> Commit:
    """Judge a bucket's records as its survey did; store those up to the last priority."""
    verdicts = _decide(task)
    selected = sorted(verdicts.selected, key=stream_order)
    data = "".join(utterance.to_json() + "\n" for utterance in selected).encode()
    output = task.context.put_output(task.name, ".jsonl", data, Tally.of(selected))
    lost = Tally.of(verdicts.quarantined)
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=(output,),
        ledger=task.context.put_ledger(task.name, verdicts.quarantined),
        tally_in=output.tally + verdicts.unselected + lost,
        quarantined=lost,
        unselected=verdicts.unselected,
        statistics={"months": _months(selected)},
    )
    return task.context.commit(record)


def _decide(task: DrawnTask) -> _Verdicts:
    lists = (read_duplicates(task.context, each, task.number) for each in task.duplicates)
    elsewhere = frozenset[int]().union(*lists)
    candidates: list[_Candidate] = []
    selected, quarantined, left_ms = [], [], []
    for record, rejection, priority, num_bytes in task.rules.judge(task.context.store, task.bucket):
        if isinstance(record, Quarantined):
            quarantined.append(record)
        elif rejection is None and (priority <= task.last_priority or priority in elsewhere):
            candidates.append(_Candidate(record, priority, num_bytes))
        else:
            left_ms.append(record.duration_ms)
    is_kept = _within_cap(candidates, task.rules.filters.max_speaker_ms)
    for candidate, kept in zip(candidates, is_kept, strict=True):
        if not kept:
            left_ms.append(candidate.record.duration_ms)
        elif candidate.priority in elsewhere:
            quarantined.append(duplicate(candidate.record, candidate.num_bytes))
        else:
            selected.append(candidate.record)
    return _Verdicts(selected, quarantined, Tally(len(left_ms), sum(left_ms)))


def _within_cap(candidates: Sequence[_Candidate], cap_ms: int) -> Bool[np.ndarray, " candidates"]:
    # Lower priorities alone decide, and those are candidates too: as in the survey.
    numbers: dict[str, int] = {}
    speakers = [numbers.setdefault(each.record.speaker_id, len(numbers)) for each in candidates]
    return within_speaker_cap(
        np.array(speakers, np.uint64),
        np.array([each.priority for each in candidates], np.uint64),
        np.array([each.record.duration_ms for each in candidates], np.int64),
        cap_ms,
    )


def _months(utterances: Sequence[Utterance]) -> dict[str, dict[str, int]]:
    """Tallies by month of creation, as written in the records."""
    durations_ms: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for utterance in utterances:
        month = datetime.fromisoformat(utterance.created_at).isoformat()[:7]
        durations_ms[month] += utterance.duration_ms
        counts[month] += 1
    return {month: asdict(Tally(counts[month], durations_ms[month])) for month in sorted(counts)}
