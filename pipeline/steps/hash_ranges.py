"""Join what many tasks wrote by ranges of hashes: each task cuts its own, others merge a range.

Hashes are sorted and cut at the same values everywhere, so that one range of all tasks holds all
records that share an utterance id or a speaker id. A gathering task stores one object with an
extent for each range, so that objects, PUTs and what the driver holds grow with the tasks, and not
with their product with the ranges. Each reader of an object gets its own extent by a range GET.

An object begins with a table of entries; the extents' bytes follow in order. An entry has 56 bytes:

    4   number of extents in the object, little-endian as all numbers
    4   number of this extent, from 0
    8   where its bytes begin in the object
    8   where they end
    32  SHA-256 of the 24 bytes before, followed by the extent's bytes

Each entry is protected by itself: of 10,000 readers each reads one, and not a table of 560 kB.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Int64, Shaped, UInt64

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, until_whole
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, Task
from pipeline.runs.engine import ScratchTasks
from pipeline.runs.manifest import Output, Outputs

_HASH = np.dtype("<u8")
UTTERANCE = np.dtype([("priority", "<u8"), ("duration_ms", "<u4")])
Utterances = Shaped[np.ndarray, " _utterances"]
"""Priorities and durations, each pair an UTTERANCE."""


@dataclass(frozen=True, slots=True)
class HashRange:
    """HashRange holds a bucket's part of a range: utterances by rising priority, and speakers."""

    utterances: Utterances
    speakers: UInt64[np.ndarray, " speakers"]

    def to_bytes(self) -> bytes:
        """Write the number of utterances, then 12 bytes an utterance and 8 a speaker."""
        count = np.array([len(self.utterances)], _HASH)
        return count.tobytes() + self.utterances.tobytes() + self.speakers.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "HashRange":
        """Read what `to_bytes` wrote; ValueError for another number of bytes."""
        count = int.from_bytes(data[: _HASH.itemsize], "little")
        end = _HASH.itemsize + UTTERANCE.itemsize * count
        if len(data) < end or (len(data) - end) % _HASH.itemsize:
            need = f"need {end}, and {_HASH.itemsize} a speaker"
            raise ValueError(f"a range of {count} utterances in {len(data)} bytes: {need}")
        utterances = np.frombuffer(data, UTTERANCE, count, _HASH.itemsize)
        return cls(utterances, np.frombuffer(data, _HASH, offset=end))


def utterances_of(
    priorities: UInt64[np.ndarray, " utterances"], durations_ms: Int64[np.ndarray, " utterances"]
) -> Utterances:
    """Put priorities and durations side by side."""
    utterances = np.empty(len(priorities), UTTERANCE)
    utterances["priority"], utterances["duration_ms"] = priorities, durations_ms
    return utterances


def cut_into_ranges(
    utterances: Utterances, speakers: UInt64[np.ndarray, " speakers"], num_ranges: int
) -> list[HashRange]:
    """Sort a bucket's hashes and cut them where every bucket is cut."""
    # Hashes are uniform, so ranges of equal width hold nearly equally many.
    utterances, speakers = utterances[np.argsort(utterances["priority"])], np.sort(speakers)
    columns = (
        np.split(utterances, range_edges(utterances["priority"], num_ranges)[1:-1]),
        np.split(speakers, range_edges(speakers, num_ranges)[1:-1]),
    )
    return [HashRange(*part) for part in zip(*columns, strict=True)]


def range_edges(
    hashes: UInt64[np.ndarray, " hashes"], num_ranges: int
) -> Int64[np.ndarray, " edges"]:
    """Return where each range of rising hashes begins, and where the last one ends."""
    # By the upper 32 bits: their product with a number of ranges fits into 64.
    upper, shift = hashes >> np.uint64(32), np.uint64(32)
    ranges = (upper * np.uint64(num_ranges)) >> shift
    return np.searchsorted(ranges, np.arange(num_ranges + 1, dtype=np.uint64)).astype(np.int64)


def overlapping(ranges: Sequence[Output], numbers: range, num_ranges: int) -> tuple[Output, ...]:
    """Return the ranges of an index that share hashes with some of ours, of another index."""
    first = max(numbers.start * len(ranges) // num_ranges - 1, 0)
    last = (numbers.stop * len(ranges) - 1) // num_ranges
    return tuple(ranges[first : last + 2])


def is_among(
    hashes: UInt64[np.ndarray, " names"], risen: UInt64[np.ndarray, " others"]
) -> Bool[np.ndarray, " names"]:
    """Return for each hash whether it is in `risen`, which are sorted."""
    # A search in sorted hashes: np.isin and np.setdiff1d take many times as long for 64 bits.
    places = np.searchsorted(risen, hashes)
    is_there = np.zeros(len(hashes), bool)
    inside = places < len(risen)
    is_there[inside] = risen[places[inside]] == hashes[inside]
    return is_there


MAX_EXTENTS = 1_000_000
"""Their table takes 56 MB."""

_PLACE = Struct("<IIQQ")
ENTRY_BYTES = _PLACE.size + hashlib.sha256().digest_size


def join_extents(extents: Sequence[bytes]) -> bytes:
    """Write extents as one object; ValueError for none, and for more than a million."""
    count = len(extents)
    if not 1 <= count <= MAX_EXTENTS:
        raise ValueError(
            f"{count} extents in an object: need 1..{MAX_EXTENTS}: put metadata into fewer buckets"
        )
    table, end = [], ENTRY_BYTES * count
    for number, data in enumerate(extents):
        begin, end = end, end + len(data)
        place = _PLACE.pack(count, number, begin, end)
        table.append(place + _digest(place, data))
    return b"".join((*table, *extents))


@dataclass(frozen=True, slots=True)
class ExtentPlace:
    """ExtentPlace is an extent's number, of how many, in an object of known size."""

    uri: str
    object_bytes: int
    number: int
    num_extents: int

    def read(self, store: ObjectStore) -> bytes:
        """Read the extent; ValueError with the URI if the bytes are damaged at rest."""
        return until_whole(self.uri, lambda: self._read_once(store))

    def _read_once(self, store: ObjectStore) -> bytes:
        # A lone extent is the whole object, and needs no second request.
        is_lone = self.num_extents == 1
        first_bytes = self.object_bytes if is_lone else ENTRY_BYTES
        found = self._fetch(store, ENTRY_BYTES * self.number, first_bytes)
        entry, data = found[:ENTRY_BYTES], found[ENTRY_BYTES:]
        begin, end = self._parse(entry[: _PLACE.size])
        if end > begin and not is_lone:
            data = self._fetch(store, begin, end - begin)
        if _digest(entry[: _PLACE.size], data) != entry[_PLACE.size :]:
            raise self._damage("SHA-256 is not that of its entry")
        return data

    def _fetch(self, store: ObjectStore, start: int, num_bytes: int) -> bytes:
        found = store.fetch_range(self.uri, start, num_bytes)
        if (found.object_bytes, len(found.data)) != (self.object_bytes, num_bytes):
            raise self._damage(
                f"{len(found.data)} bytes of {num_bytes} in an object of {found.object_bytes}, "
                f"which had {self.object_bytes}"
            )
        return found.data

    def _parse(self, place: bytes) -> tuple[int, int]:
        count, number, begin, end = _PLACE.unpack(place)
        first = ENTRY_BYTES * self.num_extents
        if (count, number) != (self.num_extents, self.number):
            raise self._damage(f"the entry is of extent {number} of {count}")
        if not first <= begin <= end <= self.object_bytes:
            raise self._damage(
                f"bytes {begin} to {end}: need places from {first} to {self.object_bytes}"
            )
        return begin, end

    def _damage(self, said: str) -> ValueError:
        return ValueError(
            f"extent {self.number} of {self.num_extents}: {said}: the object was altered or "
            "damaged; remove the folder scratch above it, and run the step again"
        )


def _digest(place: bytes, data: bytes) -> bytes:
    digest = hashlib.sha256(place)
    digest.update(data)
    return digest.digest()


MAX_CARRIED = 4_000
"""The tasks of a pass carry so many names of objects together, 0.7 MB. A longer list is stored, and
each task reads it: 150 tasks with 10,000 names each would take 250 MB in the driver's JVM."""

G = TypeVar("G", bound=Task)
M = TypeVar("M", bound=Task)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Gathered names the objects that tasks stored for others, each with an extent for any reader.

    It travels to all readers.
    """

    context: StepContext
    objects: Outputs
    num_extents: int

    @classmethod
    def of(cls, context: StepContext, objects: Sequence[Output], num_extents: int) -> "Gathered":
        """Name the objects to as many readers as each has extents; a long list is stored."""
        if len(objects) * num_extents <= MAX_CARRIED:
            return cls(context, tuple(objects), num_extents)
        listed = context.put_parts("gathered", (output.to_line() for output in objects))
        return cls(context, listed, num_extents)

    def read(self, number: int) -> Iterator[bytes]:
        """Yield extent `number` of each object, in the objects' order."""
        found = prefetch(partial(self._read_of, number), self.objects)
        return (data for _, data in found)

    def _read_of(self, number: int, output: Output) -> bytes:
        uri = output.uri(self.context.run_uri)
        place = ExtentPlace(uri, output.num_bytes, number, self.num_extents)
        return place.read(self.context.store)


def cut_and_merge(
    scratch: ScratchTasks,
    gathers: Iterable[G],
    gather: Callable[[G], Commit],
    num_ranges: int,
    merge_of: Callable[[int, Gathered], M],
    merge: Callable[[M], Commit],
    described: tuple[str, str],
) -> tuple[Output, ...]:
    """Gather, then merge; return what the merges wrote, in the order of ranges.

    Each gathering task writes an extent a range, if there are such tasks. `merge_of` makes the
    task of a range from its number and what all have written.
    """
    commits = scratch.run(list(gathers), gather, described[0])
    gathered = Gathered.of(scratch.context, gathered_objects(commits), num_ranges)
    merges = [merge_of(number, gathered) for number in range(num_ranges)]
    merged = scratch.run(merges, merge, described[1])
    return tuple(output for commit in merged for output in commit.outputs)


def gathered_objects(commits: Sequence[Commit]) -> list[Output]:
    """Return the one object of each gathering task."""
    return [output for commit in commits for output in commit.outputs]


def put_extents(
    context: StepContext, name: str, suffix: str, extents: Iterable[bytes], tally: Tally
) -> Output:
    """Store extents as one object."""
    return context.put_output(name, suffix, join_extents(list(extents)), tally)


def commit_ranges(context: StepContext, name: str, suffix: str, ranges: Iterable[bytes]) -> Commit:
    """Store a task's ranges as extents, and commit them, without utterances of their own."""
    return commit_objects(context, name, [put_extents(context, name, suffix, ranges, Tally())])


def commit_objects(context: StepContext, name: str, outputs: Iterable[Output]) -> Commit:
    """Commit objects without utterances of their own."""
    return context.commit(Commit(name, context.fingerprint, tuple(outputs)))
