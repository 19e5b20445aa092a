"""The survey: what each speaker bucket holds that may be drawn."""

from array import array
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64

from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.manifest import Output
from pipeline.sampling import sampling_priority, within_speaker_cap
from pipeline.steps.selection.buckets import Bucket
from pipeline.steps.selection.hash_ranges import HashRange, cut_into_ranges
from pipeline.steps.selection.record_rules import Rules


@dataclass(frozen=True, slots=True)
class SurveyTask:
    """One speaker bucket to survey."""

    context: StepContext
    rules: Rules
    bucket: Bucket
    num_ranges: int


def survey_bucket(task: SurveyTask) -> Commit:
    """Judge a bucket's records; store the hashes of those that may be drawn, range by range."""
    survey = _Survey.of(task)
    kept = within_speaker_cap(
        survey.speakers, survey.priorities, survey.durations_ms, task.rules.filters.max_speaker_ms
    )
    over_cap = _tally(survey.durations_ms[~kept])
    ranges = cut_into_ranges(
        survey.priorities[kept], survey.durations_ms[kept], survey.speaker_hashes, task.num_ranges
    )
    rejected = survey.rejected | ({"max_speaker_hours": over_cap} if over_cap.utterances else {})
    unselected = sum(rejected.values(), Tally())
    record = Commit(
        task=task.bucket.name,
        fingerprint=task.context.fingerprint,
        outputs=tuple(_put_range(task, number, part) for number, part in enumerate(ranges)),
        ledger=None,
        tally_in=_tally(survey.durations_ms[kept]) + survey.quarantined + unselected,
        quarantined=survey.quarantined,
        unselected=unselected,
        statistics={"unselected": {reason: asdict(each) for reason, each in rejected.items()}},
    )
    return task.context.commit(record)


@dataclass(frozen=True, slots=True)
class _Survey:
    """A bucket's records that passed the filters, as columns, and tallies of the others."""

    priorities: UInt64[np.ndarray, " utterances"]
    durations_ms: Int64[np.ndarray, " utterances"]
    speakers: UInt64[np.ndarray, " utterances"]
    speaker_hashes: UInt64[np.ndarray, " _speakers"]
    quarantined: Tally
    rejected: dict[str, Tally]

    @classmethod
    def of(cls, task: SurveyTask) -> "_Survey":
        # Plain columns: 24 bytes an utterance, where objects would take 500.
        priorities, durations_ms, owners = array("Q"), array("q"), array("Q")
        numbers: dict[str, int] = {}
        quarantined = array("q")
        rejected: dict[str, Any] = defaultdict(lambda: array("q"))
        for record, rejection, priority, _ in task.rules.judge(task.context.store, task.bucket):
            if isinstance(record, Quarantined):
                quarantined.append(record.duration_ms)
                continue
            number = numbers.setdefault(record.speaker_id, len(numbers))
            if rejection is not None:
                rejected[rejection].append(record.duration_ms)
                continue
            priorities.append(priority)
            durations_ms.append(record.duration_ms)
            owners.append(number)
        hashes = [sampling_priority(task.rules.seed, name) for name in numbers]
        return cls(
            np.array(priorities, np.uint64),
            np.array(durations_ms, np.int64),
            np.array(owners, np.uint64),
            np.array(hashes, np.uint64),
            _tally(np.array(quarantined, np.int64)),
            {name: _tally(np.array(rejected[name], np.int64)) for name in sorted(rejected)},
        )


def _put_range(task: SurveyTask, number: int, part: HashRange) -> Output:
    name = f"{task.bucket.name}-{number:05d}"
    return task.context.put_output(name, ".hashes", part.to_bytes(), _tally(part.durations_ms))


def _tally(durations_ms: Int64[np.ndarray, " _utterances"]) -> Tally:
    return Tally(len(durations_ms), int(durations_ms.sum()))
