"""Find the utterances of an increment's metadata that earlier runs of its chain have selected.

Their ids are looked up in the id indexes of those runs, range by range of hashes, as sorted lists:
no process holds more than one range, however long the chain is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import UInt64

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext
from pipeline.runs.manifest import Manifest, Output, own_outputs, read_manifest, read_output
from pipeline.runs.step import Distribute
from pipeline.steps.range_merge import Gathered, gathered_objects, put_extents
from pipeline.steps.selection.deduplicate import read_hashes
from pipeline.steps.selection.id_index import metadata_names
from pipeline.steps.selection.id_ranges import IdRange

_GETS_IN_FLIGHT = 16

Hashes = UInt64[np.ndarray, " _ids"]


@dataclass(frozen=True, slots=True)
class SelectedBefore:
    """SelectedBefore lists the ids of buckets that earlier runs have selected: an extent a bucket.

    A selection with a larger budget reads all metadata again, and meets them where they were.
    """

    lists: Gathered | None
    is_read_again: bool

    def read(self, bucket: int) -> frozenset[int]:
        """Read the hashes of a bucket's ids."""
        return frozenset() if self.lists is None else read_hashes(self.lists.read(bucket))


NOTHING_BEFORE = SelectedBefore(None, is_read_again=False)


@dataclass(frozen=True, slots=True)
class _RunIndex:
    """The id index of one run of the chain, and which of its objects are selection files."""

    ranges: tuple[Output, ...]
    first_file: int
    num_files: int

    @classmethod
    def of(cls, run_uri: str, manifest: Manifest) -> "_RunIndex":
        ranges = tuple(each.seen_from(run_uri) for each in manifest.id_index)
        num_files = len(own_outputs(manifest.outputs))
        return cls(ranges, len(metadata_names(manifest)), num_files)

    def part(self, number: int, num_ranges: int) -> "_RunIndex":
        """Return the index with the ranges alone that share hashes with a range of another one."""
        own = len(self.ranges)
        first = max(number * own // num_ranges - 1, 0)
        last = ((number + 1) * own - 1) // num_ranges + 2
        return _RunIndex(self.ranges[first:last], self.first_file, self.num_files)

    def selected(self, parts: Sequence[IdRange]) -> Hashes:
        """Return the ids that files have, among those that the index has of any object."""
        end = self.first_file + self.num_files
        return np.concatenate(
            [
                np.empty(0, np.uint64),
                *(
                    part.hashes[(part.objects >= self.first_file) & (part.objects < end)]
                    for part in parts
                ),
            ]
        )


@dataclass(frozen=True, slots=True)
class _RangeTask:
    """One range of hashes: the ids of each bucket in it, and the indexes of the chain's runs."""

    number: int
    ids: Gathered
    chain: tuple[_RunIndex, ...]


def find_selected_before(
    scratch: StepContext,
    bases: Sequence[str],
    step: str,
    hashed: Sequence[Commit],
    num_ranges: int,
    distribute: Distribute,
) -> Gathered:
    """List the ids of each bucket that a run among the `bases` has selected.

    `hashed` are the commits of the buckets' ids, in ranges.
    """
    indexes = [_RunIndex.of(base, _selection(scratch.store, base, step)) for base in bases]
    ids = Gathered.of(scratch, gathered_objects(hashed), num_ranges)
    tasks = [
        _RangeTask(number, ids, tuple(each.part(number, num_ranges) for each in indexes))
        for number in range(num_ranges)
    ]
    found = distribute(tasks, _find_in_range, "look for what was selected before")
    return Gathered.of(scratch, [each for each in found if each], len(hashed))


def _selection(store: ObjectStore, run_uri: str, step: str) -> Manifest:
    manifest = read_manifest(store, run_uri, step)
    if own_outputs(manifest.outputs) and not manifest.id_index:
        raise ValueError(
            f"{run_uri}: {step} has no id index, as an earlier version made it: an increment "
            "cannot tell what it has selected; select again into a new --run, and extend that one"
        )
    return manifest


def _find_in_range(task: _RangeTask) -> Output | None:
    """Store the ids of a range that a run of the chain has selected, if there are some."""
    scratch = task.ids.context
    read = partial(_read_range, scratch)
    buckets = list(map(IdRange.from_bytes, task.ids.read(task.number)))
    before = [np.empty(0, np.uint64)]
    for each in task.chain:
        before.append(
            each.selected([part for _, part in prefetch(read, each.ranges, _GETS_IN_FLIGHT)])
        )
    selected = np.unique(np.concatenate(before))
    found = [_among(np.unique(part.hashes), selected) for part in buckets]
    if not any(map(len, found)):
        return None
    extents = (ids.astype("<u8").tobytes() for ids in found)
    return put_extents(scratch, f"before-{task.number:05d}", ".before", extents, Tally())


def _among(ids: Hashes, selected: Hashes) -> Hashes:
    return ids[np.isin(ids, selected, assume_unique=True)]


def _read_range(context: StepContext, output: Output) -> IdRange:
    return IdRange.from_bytes(read_output(context.store, context.run_uri, output))
