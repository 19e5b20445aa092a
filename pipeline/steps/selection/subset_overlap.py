"""Refuse a selection that shares an utterance, a speaker or audio with another subset's.

Each selection commits its files, then compares itself with the commits of the other subsets, and
only then writes its manifest. So of two selections at the same time at least one sees the other.
What has manifests in one run is disjoint, whatever the order: no speaker of training is in
the word error rates. Only selected records count: what is left out is neither trained nor scored.

Audio is shared where utterances of whatever id are the same object, the same file of an archive,
or segments of a recording that overlap. Segments that do not overlap may be in several subsets, as
those of a meeting's speakers.
"""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from infra.store.object_store import PrefixError, normalize_uri
from infra.store.uris import resolve_audio
from pipeline.records import Member, Segment, Tally, Utterance, parse_utterance
from pipeline.runs.commit import StepContext, read_commits
from pipeline.runs.engine import Distribute
from pipeline.runs.manifest import Output, is_finished, read_manifest
from pipeline.runs.names import ALL_SUBSETS, selection_step
from pipeline.sampling import hash_name, hash_names
from pipeline.steps.hash_ranges import (
    Gathered,
    HashRange,
    cut_into_ranges,
    is_among,
    put_extents,
    range_edges,
    utterances_of,
)

_RANGE_UTTERANCES = 10_000_000
"""A range's task holds of so many utterances 12 bytes of names and 20 of audio, and a copy."""

_GROUP_FILES = 64
_UTTERANCE, _SPEAKER, _AUDIO = "utterance", "speaker", "audio"

_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_COUNT = np.dtype("<u8")
SPAN = np.dtype([("audio", "<u8"), ("start_ms", "<u8"), ("duration_ms", "<u4")])
"""The hash of an utterance's audio, and its place in it: from 0 to `_WHOLE_MS` of a whole one."""
_WHOLE_MS = 2**32 - 1
_AUDIO_MS = np.uint64(2**36)  # more than the end of any span

Hashes = UInt64[np.ndarray, " _names"]
Spans: TypeAlias = np.ndarray


@dataclass(frozen=True, slots=True)
class _Group:
    """The selection files of one committed task of a subset."""

    context: StepContext
    subset: str
    files: tuple[Output, ...]
    corpus_uri: str


@dataclass(frozen=True, slots=True)
class _RangeTask:
    """One range, the subset whose selection is compared, and the groups' subsets and hashed ids."""

    number: int
    subset: str
    groups: tuple[str, ...]
    hashes: Gathered


@dataclass(frozen=True, slots=True)
class SubsetRange:
    """SubsetRange holds what a group's utterances have in a range: names, and spans by audio."""

    names: HashRange
    spans: Spans

    def to_bytes(self) -> bytes:
        """Write the number of spans, 20 bytes each, and the names."""
        count = np.array([len(self.spans)], _COUNT)
        return count.tobytes() + self.spans.tobytes() + self.names.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "SubsetRange":
        """Read what `to_bytes` wrote; ValueError for another number of bytes."""
        count = int.from_bytes(data[: _COUNT.itemsize], "little")
        end = _COUNT.itemsize + count * SPAN.itemsize
        if len(data) < end:
            raise ValueError(f"a range of {count} spans in {len(data)} bytes: need {end} and more")
        spans = np.frombuffer(data, SPAN, count, _COUNT.itemsize)
        return cls(HashRange.from_bytes(data[end:]), spans)


@dataclass(frozen=True, slots=True)
class _Example:
    """A hash that a group of files has, and the milliseconds at which its audio begins."""

    group: int
    kind: str
    hash: int
    start_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The number of one kind that two subsets share, and an example: of audio, one of each."""

    kind: str
    other: str
    count: int
    examples: tuple[_Example, ...]


def require_disjoint(
    context: StepContext,
    corpus_uri: str,
    subset: str,
    distribute: Distribute,
    *,
    has_base: bool = False,
) -> None:
    """Compare a subset's committed selection with those of the other subsets in its run.

    ValueError names a shared utterance, speaker or audio. The driver holds object names alone;
    equal 64-bit hashes count as equal ids.
    """
    groups_of = partial(_inherited_groups if has_base else _groups, context, corpus_uri)
    others = [group for each in ALL_SUBSETS if each != subset for group in groups_of(each)]
    if not others:
        return
    groups = [*_groups(context, corpus_uri, subset), *others]
    num_utterances = sum(output.utterances for group in groups for output in group.files)
    # A task compares 10 million utterances at a time, however large the corpus is.
    ranges = 1 + num_utterances // _RANGE_UTTERANCES
    to_hash = [(group, ranges) for group in groups]
    hashed = distribute(to_hash, _hash_group, "hash the subsets")
    hashes = Gathered.of(groups[0].context, hashed, ranges)
    subsets = tuple(group.subset for group in groups)
    tasks = [_RangeTask(number, subset, subsets, hashes) for number in range(ranges)]
    found = [each for some in distribute(tasks, _compare, "compare the subsets") for each in some]
    if found:
        firsts = {(each.other, each.kind): each for each in reversed(found)}
        examples = [(groups[each.group], each) for it in firsts.values() for each in it.examples]
        # A hash has no name, so the files are read again for one example of each kind.
        records = iter(distribute(examples, _find, "name what the subsets share"))
        named = {key: [next(records) for _ in it.examples] for key, it in firsts.items()}
        raise ValueError(_refusal(subset, found, named))


def _groups(context: StepContext, corpus_uri: str, subset: str) -> Iterator[_Group]:
    for commit in read_commits(context.store, context.run_uri, selection_step(subset)):
        yield _Group(context.scratch, subset, commit.outputs, corpus_uri)


def _inherited_groups(context: StepContext, corpus_uri: str, subset: str) -> Iterator[_Group]:
    """Yield the files of a subset that the run has taken over; the base has their commits."""
    step = selection_step(subset)
    if is_finished(context.store, context.run_uri, step):
        files = tuple(read_manifest(context.store, context.run_uri, step).outputs)
        for first in range(0, len(files), _GROUP_FILES):
            some = files[first : first + _GROUP_FILES]
            yield _Group(context.scratch, subset, some, corpus_uri)


def _hash_group(task: tuple[_Group, int]) -> Output:
    group, num_parts = task
    utterances, durations_ms = array("Q"), array("q")
    speakers: set[str] = set()
    audio, starts_ms, lengths_ms = array("Q"), array("Q"), array("Q")
    for record in _records(group):
        utterances.append(hash_name(record.utterance_id))
        durations_ms.append(record.duration_ms)
        speakers.add(record.speaker_id)
        name, start_ms, length_ms = _span(group.corpus_uri, record)
        audio.append(name)
        starts_ms.append(start_ms)
        lengths_ms.append(length_ms)
    names = cut_into_ranges(
        utterances_of(np.array(utterances, np.uint64), np.array(durations_ms, np.int64)),
        hash_names(speakers),
        num_parts,
    )
    order = np.argsort(np.array(audio, np.uint64))
    spans = np.empty(len(audio), SPAN)
    for column, values in zip(SPAN.names or (), (audio, starts_ms, lengths_ms), strict=True):
        spans[column] = np.array(values, np.uint64)[order]
    edges = pairwise(range_edges(spans["audio"], num_parts))
    parts = [spans[begin:end] for begin, end in edges]
    data = (SubsetRange(*part).to_bytes() for part in zip(names, parts, strict=True))
    tally = Tally(len(utterances), sum(durations_ms))
    return put_extents(group.context, f"subset-{group.subset}", ".hashes", data, tally)


def _span(corpus_uri: str, record: Utterance) -> tuple[int, int, int]:
    """Return the hash of an utterance's audio, where it begins in it, and how long it is."""
    audio = resolve_audio(corpus_uri, record.audio_uri)
    folder, _, name = audio.rpartition("/")
    if folder.endswith("/") or not _PLAIN_NAME.fullmatch(name):
        audio = _normalized(audio)
    else:  # folders are few: their spelling is looked up in 1 us, where a URI's takes 5
        audio = f"{_normalized(folder)}/{name}"
    if isinstance(record.part, Member):
        # Whatever else says which samples of an object are heard belongs into its name too.
        audio = f"{audio}\0{record.part.offset}"
    if isinstance(record.part, Segment):
        return hash_name(audio), round(1000 * record.part.start_s), record.duration_ms
    return hash_name(audio), 0, _WHOLE_MS


@lru_cache(maxsize=4096)
def _normalized(uri: str) -> str:
    try:
        return normalize_uri(uri)
    except PrefixError:  # what cannot be read is left to extraction
        return uri


def _compare(task: _RangeTask) -> list[_Overlap]:
    ranges = list(map(SubsetRange.from_bytes, task.hashes.read(task.number)))
    others = sorted(set(task.groups) - {task.subset})
    overlaps = []
    for kind in (_UTTERANCE, _SPEAKER):
        names = [each.names for each in ranges]
        columns = [
            each.utterances["priority"] if kind == _UTTERANCE else each.speakers for each in names
        ]
        own = _of_subset(task.subset, task.groups, columns)
        for other in others:
            # Among 1e9 utterances one false pair of 64-bit hashes has a chance of 2.7 %.
            shared = np.intersect1d(own, _of_subset(other, task.groups, columns))
            if len(shared):
                holders = (n for n, each in enumerate(task.groups) if each == task.subset)
                group = next(n for n in holders if np.isin(shared[0], columns[n]))
                example = _Example(group, kind, int(shared[0]))
                overlaps.append(_Overlap(kind, other, len(shared), (example,)))
    spans = [each.spans for each in ranges]
    for other in others:
        subsets = task.subset, other
        overlaps += _shared_audio(
            other, [_with_groups(each, task.groups, spans) for each in subsets]
        )
    return overlaps


def _shared_audio(
    other: str, of_both: Sequence[tuple[Spans, Int64[np.ndarray, " _spans"]]]
) -> list[_Overlap]:
    """Find a subset's spans that overlap with another's."""
    (own, own_groups), (theirs, their_groups) = of_both
    is_shared = overlapping(own, theirs)
    if not is_shared.any():
        return []
    first = int(np.flatnonzero(is_shared)[0])
    place = int(np.flatnonzero(overlapping(theirs, own[first : first + 1]))[0])
    examples = (
        _Example(int(groups[at]), _AUDIO, int(spans[at]["audio"]), int(spans[at]["start_ms"]))
        for spans, groups, at in ((own, own_groups, first), (theirs, their_groups, place))
    )
    return [_Overlap(_AUDIO, other, int(is_shared.sum()), tuple(examples))]


def overlapping(spans: Spans, others: Spans) -> Bool[np.ndarray, " _spans"]:
    """Return for each span whether one of the others has more than a millisecond of its audio."""
    found = np.zeros(len(spans), np.bool_)
    places = np.flatnonzero(is_among(spans["audio"], np.sort(others["audio"])))
    common = np.unique(spans["audio"][places])
    start, end = _on_one_axis(spans[places], common)
    others_start, others_end = _on_one_axis(others[is_among(others["audio"], common)], common)
    order = np.argsort(others_start)
    # The latest end of the others up to each: of an audio before, it is before this one's start.
    latest = np.maximum.accumulate(others_end[order])
    # Starts and ends are rounded to a millisecond, so that neighbours may seem to share one.
    num_begun = np.searchsorted(others_start[order], end - np.uint64(1))
    has_begun = num_begun > 0
    found[places[has_begun]] = latest[num_begun[has_begun] - 1] > start[has_begun] + np.uint64(1)
    return found


def _on_one_axis(spans: Spans, audio: Hashes) -> tuple[Hashes, Hashes]:
    """Return the start and the end of spans on an axis of milliseconds, one audio after another."""
    start = np.searchsorted(audio, spans["audio"]).astype(np.uint64) * _AUDIO_MS + spans["start_ms"]
    return start, start + spans["duration_ms"]


def _with_groups(
    subset: str, groups: Sequence[str], spans: Sequence[Spans]
) -> tuple[Spans, Int64[np.ndarray, " _spans"]]:
    """Join the spans of a subset's groups, and return the number of each one's group."""
    numbers = [number for number, each in enumerate(groups) if each == subset]
    joined = np.concatenate([np.empty(0, SPAN), *(spans[number] for number in numbers)])
    return joined, np.repeat(numbers, [len(spans[number]) for number in numbers]).astype(np.int64)


def _of_subset(subset: str, groups: Sequence[str], columns: Sequence[Hashes]) -> Hashes:
    some = [column for each, column in zip(groups, columns, strict=True) if each == subset]
    return np.concatenate([np.empty(0, np.uint64), *some])


def _find(task: tuple[_Group, _Example]) -> Utterance:
    group, wanted = task
    for record in _records(group):
        if wanted.kind == _AUDIO:
            if _span(group.corpus_uri, record)[:2] == (wanted.hash, wanted.start_ms):
                return record
            continue
        name = record.utterance_id if wanted.kind == _UTTERANCE else record.speaker_id
        if hash_name(name) == wanted.hash:
            return record
    raise AssertionError("a task has hashed the example")


def _refusal(
    subset: str, found: Sequence[_Overlap], named: Mapping[tuple[str, str], Sequence[Utterance]]
) -> str:
    facts = []
    # Names come before audio.
    by_kind = sorted(named.items(), key=lambda item: (item[0][1] == _AUDIO, *item[0]))
    for (other, kind), (record, *others) in by_kind:
        count = sum(each.count for each in found if (each.other, each.kind) == (other, kind))
        what = f"{count:,} {kind}(s) with {selection_step(other)}"
        example = repr(record.speaker_id if kind == _SPEAKER else record.utterance_id)
        if kind == _AUDIO:
            what = f"the audio of {count:,} utterance(s) with {selection_step(other)}"
            ids = f"{record.utterance_id!r} here and {others[0].utterance_id!r} there"
            example = f"{record.audio_uri!r}, which is {ids}"
        facts.append(f"{what}, such as {example}")
    return (
        f"{selection_step(subset)} shares {'; '.join(facts)}: need each speaker, utterance and "
        "stretch of audio in one subset, or word error rates would be of speech that training "
        "heard; correct the metadata, and select again into a new --run"
    )


def _records(group: _Group) -> Iterator[Utterance]:
    for output in group.files:
        for line in group.context.read(output).splitlines():
            yield parse_utterance(line.decode())
