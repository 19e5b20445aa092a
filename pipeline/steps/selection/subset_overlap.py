"""Refuse a selection that shares an utterance or a speaker with another subset's.

Each selection commits its files, then compares itself with the commits of the other subsets, and
only then writes its manifest. So of two selections at the same time at least one sees the other.
What has manifests in one run is disjoint, whatever the order: no speaker of training is in
the word error rates. Only selected records count: what is left out is neither trained nor scored.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import UInt64

from pipeline.records import Tally, Utterance, parse_utterance
from pipeline.runs.commit import StepContext, read_commits
from pipeline.runs.manifest import Output, is_finished, read_manifest, read_output
from pipeline.runs.names import ALL_SUBSETS, SCRATCH_FOLDER, selection_step
from pipeline.runs.step import Distribute
from pipeline.sampling import hash_name
from pipeline.steps.range_merge import Gathered, put_extents
from pipeline.steps.selection.hash_ranges import HashRange, cut_into_ranges

_RANGE_UTTERANCES = 20_000_000
"""A range's task holds so many hashes of 8 bytes, and a sorted copy."""

_GROUP_FILES = 64
_UTTERANCE, _SPEAKER = "utterance", "speaker"

Hashes = UInt64[np.ndarray, " _names"]


@dataclass(frozen=True, slots=True)
class _Group:
    """The selection files of one committed task of a subset."""

    context: StepContext
    subset: str
    files: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class _RangeTask:
    """One range, the subset whose selection is compared, and the groups' subsets and hashed ids."""

    number: int
    subset: str
    groups: tuple[str, ...]
    hashes: Gathered


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The ids of one kind that two subsets share: how many, and one with its group's number."""

    kind: str
    other: str
    count: int
    example: int
    group: int


def require_disjoint(
    context: StepContext, subset: str, distribute: Distribute, *, is_increment: bool = False
) -> None:
    """Compare a subset's committed selection with those of the other subsets in its run.

    ValueError names a shared utterance or speaker. The driver holds object names alone; equal
    64-bit hashes count as equal ids.
    """
    groups_of = partial(_inherited_groups if is_increment else _groups, context)
    others = [group for each in ALL_SUBSETS if each != subset for group in groups_of(each)]
    if not others:
        return
    groups = [*_groups(context, subset), *others]
    num_utterances = sum(output.utterances for group in groups for output in group.files)
    # A task compares 20 million hashes at a time, however large the corpus is.
    ranges = num_ranges(num_utterances)
    to_hash = [(group, ranges) for group in groups]
    hashed = distribute(to_hash, _hash_group, "hash the subsets")
    hashes = Gathered.of(groups[0].context, hashed, ranges)
    subsets = tuple(group.subset for group in groups)
    tasks = [_RangeTask(number, subset, subsets, hashes) for number in range(ranges)]
    found = [each for some in distribute(tasks, _compare, "compare the subsets") for each in some]
    if found:
        firsts = {(each.other, each.kind): each for each in reversed(found)}
        examples = [(groups[each.group], each) for each in firsts.values()]
        # A hash has no name, so the files are read again for one example of each kind.
        names = distribute(examples, _name, "name what the subsets share")
        raise ValueError(_refusal(subset, found, dict(zip(firsts, names, strict=True))))


def num_ranges(num_utterances: int) -> int:
    """Count the ranges of hashes in which so many utterances of all subsets are compared."""
    return 1 + num_utterances // _RANGE_UTTERANCES


def _groups(context: StepContext, subset: str) -> Iterator[_Group]:
    scratch = replace(context, step=f"{context.step}/{SCRATCH_FOLDER}")
    step = selection_step(subset)
    for commit in read_commits(context.store, context.run_uri, step):
        yield _Group(scratch, subset, commit.outputs)


def _inherited_groups(context: StepContext, subset: str) -> Iterator[_Group]:
    """Yield the files of a subset that an increment has taken over; the base has their commits."""
    scratch = replace(context, step=f"{context.step}/{SCRATCH_FOLDER}")
    step = selection_step(subset)
    if is_finished(context.store, context.run_uri, step):
        files = tuple(read_manifest(context.store, context.run_uri, step).outputs)
        for first in range(0, len(files), _GROUP_FILES):
            yield _Group(scratch, subset, files[first : first + _GROUP_FILES])


def _hash_group(task: tuple[_Group, int]) -> Output:
    group, num_parts = task
    utterances, durations_ms = array("Q"), array("q")
    speakers: set[str] = set()
    for record in _records(group):
        utterances.append(hash_name(record.utterance_id))
        durations_ms.append(record.duration_ms)
        speakers.add(record.speaker_id)
    ranges = cut_into_ranges(
        np.array(utterances, np.uint64),
        np.array(durations_ms, np.int64),
        np.array([hash_name(speaker) for speaker in speakers], np.uint64),
        num_parts,
    )
    data = (part.to_bytes() for part in ranges)
    tally = Tally(len(utterances), sum(durations_ms))
    return put_extents(group.context, f"subset-{group.subset}", ".hashes", data, tally)


def _compare(task: _RangeTask) -> list[_Overlap]:
    ranges = list(map(HashRange.from_bytes, task.hashes.read(task.number)))
    overlaps = []
    for kind in (_UTTERANCE, _SPEAKER):
        columns = [each.priorities if kind == _UTTERANCE else each.speakers for each in ranges]
        own = _of_subset(task.subset, task.groups, columns)
        for other in sorted(set(task.groups) - {task.subset}):
            # Among 1e9 utterances one false pair of 64-bit hashes has a chance of 2.7 %.
            shared = np.intersect1d(own, _of_subset(other, task.groups, columns))
            if len(shared):
                holders = (n for n, each in enumerate(task.groups) if each == task.subset)
                group = next(n for n in holders if np.isin(shared[0], columns[n]))
                overlaps.append(_Overlap(kind, other, len(shared), int(shared[0]), group))
    return overlaps


def _of_subset(subset: str, groups: Sequence[str], columns: Sequence[Hashes]) -> Hashes:
    some = [column for each, column in zip(groups, columns, strict=True) if each == subset]
    return np.concatenate([np.empty(0, np.uint64), *some])


def _name(task: tuple[_Group, _Overlap]) -> str:
    group, overlap = task
    ids = (
        record.utterance_id if overlap.kind == _UTTERANCE else record.speaker_id
        for record in _records(group)
    )
    return next(name for name in ids if hash_name(name) == overlap.example)


def _refusal(subset: str, found: Sequence[_Overlap], names: Mapping[tuple[str, str], str]) -> str:
    facts = []
    for (other, kind), name in sorted(names.items()):
        count = sum(each.count for each in found if (each.other, each.kind) == (other, kind))
        facts.append(f"{count:,} {kind}(s) with {selection_step(other)}, such as {name!r}")
    return (
        f"{selection_step(subset)} shares {'; '.join(facts)}: need each speaker and utterance in "
        "one subset, or word error rates would be of speech that training heard; correct the "
        "metadata, and select again into a new --run"
    )


def _records(group: _Group) -> Iterator[Utterance]:
    for output in group.files:
        data = read_output(group.context.store, group.context.run_uri, output)
        for line in data.splitlines():
            yield parse_utterance(line.decode())
