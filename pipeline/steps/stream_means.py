"""Carry each stream's causal mean from a run to the increment that extends it.

A task of extraction stores where its streams ended. Other tasks merge these by ranges of hashes,
and with the base's, so that an increment finds all streams in the features that it extends.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

import numpy as np

from infra.prefetch import prefetch
from pipeline.normalization import CausalMean
from pipeline.normalization.causal_mean import (
    STREAM,
    StreamMeans,
    latest_means,
    means_from_bytes,
    means_to_bytes,
)
from pipeline.records import Tally, Utterance
from pipeline.runs.commit import Commit, StepContext, each_commit, once
from pipeline.runs.engine import Distribute, ScratchTasks, Statistics
from pipeline.runs.manifest import MAX_LISTED, Output, to_document
from pipeline.runs.names import task_name
from pipeline.sampling import hash_name
from pipeline.steps.hash_ranges import (
    Gathered,
    commit_objects,
    commit_ranges,
    cut_and_merge,
    overlapping,
    range_edges,
)
from pipeline.steps.selection.id_index import range_of

STATISTIC = "stream_means"
"""The statistic of a task that names the object with its streams' means."""

RANGE_UTTERANCES = 250_000
"""A range has the streams of so many utterances: some 1 MB of 2,500 speakers."""

GROUP_TASKS = 1_000
"""A task gathers the streams of so many selection files: some 250 MB."""

MERGED_RANGES = 64
"""A task merges so many ranges, some 84 MB: each for itself, of 200 gathering tasks of a million
hours 800,000 extents would be read."""

_SUFFIX = ".means"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Streams:
    """Streams holds where the base left a task's streams, and where the task leaves them.

    Utterances that were created before their stream's last one in the base are `late`: their
    stream's mean is the latest there is, and not that of their time.
    """

    before: StreamMeans
    places: Mapping[int, int] = field(init=False)
    after: dict[int, tuple[CausalMean, int]] = field(default_factory=dict)
    late: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.places = {int(each): place for place, each in enumerate(self.before["hash"])}

    def begin(self, utterance: Utterance) -> CausalMean:
        """Return the causal mean with which the utterance's stream begins."""
        place = self.places.get(stream_hash(utterance))
        if place is None:
            return CausalMean()
        return CausalMean(int(self.before["count"][place]), self.before["sum"][place].copy())

    def advance(self, utterance: Utterance, mean: CausalMean) -> None:
        """Keep where the stream is after an utterance whose features were written."""
        key = stream_hash(utterance)
        created_at = datetime.fromisoformat(utterance.created_at)
        created_us = (created_at - _EPOCH) // timedelta(microseconds=1)
        place = self.places.get(key)
        ended_us = created_us if place is None else int(self.before["ended_us"][place])
        if created_us < ended_us:
            self.late += Tally(1, utterance.duration_ms)
        _, known_us = self.after.get(key, (mean, ended_us))
        self.after[key] = mean, max(created_us, known_us)

    def means(self) -> StreamMeans:
        """Return where the task leaves its streams, by rising hash."""
        rows = [
            (key, mean.count, ended_us, mean.sum)
            for key, (mean, ended_us) in sorted(self.after.items(), key=itemgetter(0))
        ]
        return np.array(rows, STREAM)


NO_STREAMS = latest_means([])


def stream_hash(utterance: Utterance) -> int:
    """Hash the name of an utterance's stream: its speaker, and its stream if that has a name."""
    return hash_name(json.dumps([utterance.speaker_id, utterance.stream]))


@dataclass(frozen=True, slots=True)
class MeansPlace:
    """MeansPlace says where a step's tasks read their streams' means, and where they store them."""

    scratch: StepContext
    base: tuple[Output, ...]

    def read(self, utterances: Sequence[Utterance]) -> Streams:
        """Read where the base left the streams of some utterances; other ranges are not read."""
        hashes = np.array(sorted(set(map(stream_hash, utterances))), np.uint64)
        numbers = sorted({range_of(int(each), len(self.base)) for each in hashes})
        wanted = [self.base[number] for number in numbers] if self.base else []
        found = [part[np.isin(part["hash"], hashes)] for part in _read_all(self.scratch, wanted)]
        return Streams(latest_means(found))

    def put(self, context: StepContext, task: str, streams: Streams) -> dict[str, Any]:
        """Store where a task leaves its streams; return the statistics that name the object.

        It is no scratch: if another task is done again, all are merged again.
        """
        data = means_to_bytes(streams.means())
        stored = context.put_output(f"{task}-means", _SUFFIX, data, Tally())
        statistics: dict[str, Any] = {STATISTIC: to_document((stored,))[0]}
        if late := streams.late.utterances:
            statistics |= {"num_late": late, "late_ms": streams.late.duration_ms}
        return statistics


def named_means(commits: Iterable[Commit]) -> list[Output]:
    """Return the objects with the streams' means that tasks of extraction have stored."""
    found = (commit.statistics.get(STATISTIC) for commit in commits)
    return [Output(**each) for each in found if each]


def sum_late(tasks: Sequence[Statistics]) -> dict[str, Any]:
    """Add up the late utterances of tasks, or of tasks that were added up before, if any."""
    names = "num_late", "late_ms"
    totals = {name: sum(each.get(name, 0) for each in tasks) for name in names}
    return totals if totals["num_late"] else {}


@dataclass(frozen=True, slots=True)
class _GatherTask:
    """Some tasks of extraction, whose streams are cut into ranges."""

    context: StepContext
    extraction: StepContext
    name: str
    tasks: tuple[str, ...]
    num_ranges: int


@dataclass(frozen=True, slots=True)
class _MergeTask:
    """Neighbouring ranges: what the base has there, then what all tasks gathered."""

    context: StepContext
    extraction: StepContext
    group: int
    numbers: range
    num_ranges: int
    base: tuple[Output, ...]
    gathered: Gathered

    @property
    def name(self) -> str:
        """The task's name, with the ranges that it makes."""
        return f"means-{self.numbers.start:05d}-to-{self.numbers.stop:05d}"


def num_means_ranges(num_utterances: int) -> int:
    """Count the ranges that hold the streams of so many utterances."""
    return min(1 + num_utterances // RANGE_UTTERANCES, MAX_LISTED)


def merge_means(
    place: MeansPlace,
    context: StepContext,
    num_tasks: int,
    num_utterances: int,
    distribute: Distribute,
) -> tuple[Output, ...]:
    """Merge the base's streams with those of all tasks; return an object for each range."""
    num_ranges = num_means_ranges(num_utterances)
    names = list(map(task_name, range(num_tasks)))
    num_parts = -(-num_ranges // MERGED_RANGES)
    gathers = (
        _GatherTask(
            place.scratch,
            context,
            f"gathered-means-from-{first:06d}-in-{num_parts:05d}",
            tuple(names[first : first + GROUP_TASKS]),
            num_ranges,
        )
        for first in range(0, num_tasks, GROUP_TASKS)
    )

    def merge_of(group: int, gathered: Gathered) -> _MergeTask:
        numbers = range(num_ranges)[group * MERGED_RANGES : (group + 1) * MERGED_RANGES]
        base = overlapping(place.base, numbers, num_ranges)
        return _MergeTask(place.scratch, context, group, numbers, num_ranges, base, gathered)

    return cut_and_merge(
        ScratchTasks(context, distribute),
        gathers,
        _gather,
        num_parts,
        merge_of,
        _merge,
        ("gather the streams' means", "merge the streams' means"),
    )


@once
def _gather(task: _GatherTask) -> Commit:
    uris = [task.extraction.commit_uri(name) for name in task.tasks]
    named = named_means(each_commit(task.context.store, uris))
    whole = latest_means(_read_all(task.context, named))
    ranges = map(means_to_bytes, _cut(whole, task.num_ranges, MERGED_RANGES))
    return commit_ranges(task.context, task.name, _SUFFIX, ranges)


@once
def _merge(task: _MergeTask) -> Commit:
    gathered = map(means_from_bytes, task.gathered.read(task.group))
    parts = [*_read_all(task.context, task.base), *gathered]
    ranges = _cut(latest_means(parts), task.num_ranges, 1)
    outputs = (
        task.extraction.put_output(
            f"means-{each:05d}", _SUFFIX, means_to_bytes(ranges[each]), Tally()
        )
        for each in task.numbers
    )
    return commit_objects(task.context, task.name, outputs)


def _cut(means: StreamMeans, num_ranges: int, together: int) -> list[StreamMeans]:
    """Cut streams into ranges, of which so many stay together."""
    edges = range_edges(means["hash"], num_ranges)
    return np.split(means, edges[together:-1:together])


def _read_all(context: StepContext, outputs: Sequence[Output]) -> list[StreamMeans]:
    read = prefetch(context.read, outputs)
    return [means_from_bytes(data) for _, data in read]
