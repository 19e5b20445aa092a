"""Index a selection by utterance id: the metadata objects, files and ledgers that name it.

Some tasks hash the ids of objects, range by range of hashes; then one task a range merges what all
wrote. A range holds rising hashes of ids, each with an object that names the id. Finding an id
takes a few reads of one range, however large the corpus is.
"""

import io
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt32, UInt64

from infra.store.object_store import ObjectStore, scan_checked
from pipeline.metadata import read_ids
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import ScratchTasks
from pipeline.runs.ledger import IDENTIFIED, read_lines
from pipeline.runs.manifest import Manifest, Output, Outputs, first_own, own_outputs, read_manifest
from pipeline.runs.names import BASE_INPUT
from pipeline.sampling import hash_name
from pipeline.steps.hash_ranges import (
    Gathered,
    commit_objects,
    commit_ranges,
    cut_and_merge,
    range_edges,
)
from pipeline.steps.selection.buckets import Bucket

_HASH = np.dtype("<u8")
_OBJECT = np.dtype("<u4")
ENTRY_BYTES = _HASH.itemsize + _OBJECT.itemsize
_SPREAD = 8
"""Uniform hashes lie within so many roots of their number from where they are expected."""


@dataclass(frozen=True, slots=True)
class IdRange:
    """IdRange holds hashes by rising value, and by each the number of an object that names it."""

    hashes: UInt64[np.ndarray, " entries"]
    objects: UInt32[np.ndarray, " entries"]

    @classmethod
    def merged(cls, parts: Sequence["IdRange"]) -> "IdRange":
        """Sort the entries of all parts by hash, and those of one hash by object."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)])
        objects = np.concatenate([np.empty(0, np.uint32), *(part.objects for part in parts)])
        order = np.lexsort((objects, hashes))
        return cls(hashes[order], objects[order])

    def cut(self, num_ranges: int) -> list["IdRange"]:
        """Cut the hashes into ranges of equal width, the same ones for every index."""
        edges = range_edges(self.hashes, num_ranges)
        return [
            IdRange(self.hashes[begin:end], self.objects[begin:end])
            for begin, end in pairwise(edges)
        ]

    def to_bytes(self) -> bytes:
        """Write all hashes, then all objects: 12 bytes an entry."""
        return self.hashes.astype(_HASH).tobytes() + self.objects.astype(_OBJECT).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "IdRange":
        """Read what `to_bytes` wrote; ValueError for a part of an entry."""
        length, rest = divmod(len(data), ENTRY_BYTES)
        if rest:
            raise ValueError(f"an id index of {len(data)} bytes: need a multiple of {ENTRY_BYTES}")
        hashes = np.frombuffer(data, _HASH, length)
        objects = np.frombuffer(data, _OBJECT, length, _HASH.itemsize * length)
        return cls(hashes.astype(np.uint64), objects.astype(np.uint32))


def range_of(wanted: int, num_ranges: int) -> int:
    """Return the number of the range in which a hash lies."""
    return (wanted >> 32) * num_ranges >> 32


def find_objects(
    file: BinaryIO | io.IOBase, num_bytes: int, num_ranges: int, wanted: int
) -> list[int]:
    """Find the objects of a hash in the file of its range, of which a few blocks are read."""
    length = num_bytes // ENTRY_BYTES

    def hash_at(place: int) -> int:
        file.seek(_HASH.itemsize * place)
        return int.from_bytes(file.read(_HASH.itemsize), "little")

    # Uniform hashes: the place is known to within the spread, which one block of S3 holds.
    fraction = wanted * num_ranges / 2**64 - range_of(wanted, num_ranges)
    expected, spread = int(fraction * length), _SPREAD * int(length**0.5) + _SPREAD
    low, high = max(0, expected - spread), min(length, expected + spread)
    if low >= high or hash_at(low) >= wanted:
        low = 0
    if high < length and hash_at(high - 1) < wanted:
        high = length
    first = bisect_left(range(length), wanted, low, high, key=hash_at)
    last = first
    while last < length and hash_at(last) == wanted:
        last += 1
    file.seek(_HASH.itemsize * length + _OBJECT.itemsize * first)
    data = file.read(_OBJECT.itemsize * (last - first))
    return [int(each) for each in np.frombuffer(data, _OBJECT)]


FILES_A_TASK = 200
"""A task hashes the ids of so many selection files and ledgers: of as many as a bucket has."""

_SUFFIX = ".ids"


@dataclass(frozen=True, slots=True)
class _HashTask:
    """Objects that name utterances, and the number of each in the index."""

    context: StepContext
    name: str
    source: Bucket | tuple[Output, ...]
    numbers: tuple[int, ...]
    num_ranges: int


@dataclass(frozen=True, slots=True)
class _MergeTask:
    """One range, what all tasks gathered, and the step that keeps the result."""

    context: StepContext
    step: StepContext
    number: int
    gathered: Gathered

    @property
    def name(self) -> str:
        """The task's name."""
        return f"ids-{self.number:05d}"


def index_ids(
    scratch: ScratchTasks,
    step: StepContext,
    buckets: Sequence[Bucket],
    made: Manifest,
    num_ranges: int,
) -> tuple[Output, ...]:
    """Index the ids of a selection's metadata, files and ledgers; return an object for each range.

    The number of an object is its place among `named_objects`. The ranges are the step's.
    """
    tasks = (
        *_bucket_tasks(scratch.context, buckets, num_ranges),
        *_file_tasks(scratch.context, buckets, made, num_ranges),
    )
    return cut_and_merge(
        scratch,
        tasks,
        _hash_ids,
        num_ranges,
        partial(_MergeTask, scratch.context, step),
        _merge_ids,
        ("index the utterance ids", "merge the id index"),
    )


def hash_buckets(scratch: ScratchTasks, buckets: Sequence[Bucket], num_ranges: int) -> list[Commit]:
    """Hash the ids of each bucket's metadata, as `index_ids` does later; commits by bucket."""
    tasks = list(_bucket_tasks(scratch.context, buckets, num_ranges))
    return scratch.run(tasks, _hash_ids, "hash the utterance ids")


def metadata_names(manifest: Manifest) -> list[str]:
    """Name the metadata objects that a selection read, below their folder, in order."""
    return sorted(name for name in manifest.inputs if not name.startswith(BASE_INPUT))


def named_objects(manifest: Manifest) -> list[str]:
    """Name what an id index numbers: metadata below its folder, then files, then ledgers.

    Those that an increment takes over are in the index of the run that wrote them.
    """
    stored = (*manifest.own_outputs, *own_outputs(manifest.ledgers))
    return [*metadata_names(manifest), *(output.key for output in stored)]


def find_named(
    store: ObjectStore, run_uri: str, manifest: Manifest, utterance_id: str
) -> frozenset[str]:
    """Find the objects of a selection, and of those that it extends, that name an utterance.

    One whose hash is the same counts too.
    """
    found = frozenset[str]()
    if manifest.id_index and not manifest.is_inherited:
        wanted, num_ranges = hash_name(utterance_id), len(manifest.id_index)
        output = manifest.id_index[range_of(wanted, num_ranges)]
        numbers = scan_checked(
            store,
            output.uri(run_uri),
            lambda file: find_objects(file, output.num_bytes, num_ranges, wanted),
        )
        found = frozenset(_named(manifest, number) for number in numbers)
    if manifest.extends is None:
        return found
    base = manifest.extends.run
    before = read_manifest(store, base, manifest.step)
    return found | find_named(store, base, before, utterance_id)


def _named(manifest: Manifest, number: int) -> str:
    """Return one of `named_objects`; of a list in parts, a few parts are read."""
    metadata = metadata_names(manifest)
    if number < len(metadata):
        return metadata[number]
    place = number - len(metadata)
    first = _first_own(manifest, manifest.outputs)
    num_files = len(manifest.outputs) - first
    if place < num_files:
        return manifest.outputs[first + place].key
    return manifest.ledgers[_first_own(manifest, manifest.ledgers) + place - num_files].key


def _first_own(manifest: Manifest, outputs: Outputs) -> int:
    # A list that extends none is a run's own throughout, and none of its parts need be read.
    return 0 if manifest.extends is None else first_own(outputs)


def _bucket_tasks(
    scratch: StepContext, buckets: Sequence[Bucket], num_ranges: int
) -> Iterator[_HashTask]:
    # The inputs of a selection are its metadata; their names sort as their URIs do.
    numbers = {uri: n for n, uri in enumerate(sorted(chain(*(each.uris for each in buckets))))}
    for bucket in buckets:
        own = tuple(numbers[uri] for uri in bucket.uris)
        yield _HashTask(scratch, f"gathered-ids-of-{bucket.name}", bucket, own, num_ranges)


def _file_tasks(
    scratch: StepContext, buckets: Sequence[Bucket], made: Manifest, num_ranges: int
) -> Iterator[_HashTask]:
    num_inputs = sum(len(bucket.uris) for bucket in buckets)
    files = (*made.outputs, *made.ledgers)
    for begin in range(0, len(files), FILES_A_TASK):
        some = files[begin : begin + FILES_A_TASK]
        first = num_inputs + begin
        own = tuple(range(first, first + len(some)))
        name = f"gathered-ids-of-files-{begin:06d}-to-{begin + len(some):06d}"
        yield _HashTask(scratch, name, some, own, num_ranges)


@once
def _hash_ids(task: _HashTask) -> Commit:
    hashes, objects = array("Q"), array("L")
    for number, ids in zip(task.numbers, _ids_by_object(task), strict=True):
        # A broken line may have no id, and an object may repeat one.
        found = {hash_name(each) for each in ids if each}
        hashes.extend(found)
        objects.extend([number] * len(found))
    whole = IdRange(np.array(hashes, np.uint64), np.array(objects, np.uint32))
    ranges = (part.to_bytes() for part in IdRange.merged([whole]).cut(task.num_ranges))
    return commit_ranges(task.context, task.name, _SUFFIX, ranges)


def _ids_by_object(task: _HashTask) -> Iterator[Iterator[str]]:
    if isinstance(task.source, Bucket):
        for uri, data in task.source.read(task.context.store):
            yield read_ids(data, uri)
        return
    for output in task.source:
        lines = read_lines(task.context.read(output), IDENTIFIED)
        yield (fields["utterance_id"] for fields in lines)


@once
def _merge_ids(task: _MergeTask) -> Commit:
    parts = list(map(IdRange.from_bytes, task.gathered.read(task.number)))
    stored = task.step.put_output(task.name, _SUFFIX, IdRange.merged(parts).to_bytes(), Tally())
    return commit_objects(task.context, task.name, (stored,))
