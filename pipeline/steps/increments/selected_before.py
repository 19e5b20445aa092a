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
from pipeline.steps.selection.id_index import metadata_names
from pipeline.steps.selection.id_ranges import IdRange

_GETS_IN_FLIGHT = 16

Hashes = UInt64[np.ndarray, " _ids"]


@dataclass(frozen=True, slots=True)
class SelectedBefore:
    """SelectedBefore names the lists of a bucket's ids that earlier runs have selected.

    A selection with a larger budget reads all metadata again, and meets them where they were.
    """

    lists: tuple[Output, ...]
    is_read_again: bool

    def read(self, context: StepContext) -> frozenset[int]:
        """Read the hashes of the ids."""
        read = partial(read_output, context.store, context.run_uri)
        return frozenset[int]().union(
            *(np.frombuffer(read(each), "<u8").tolist() for each in self.lists)
        )


NOTHING_BEFORE = SelectedBefore((), is_read_again=False)


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

    context: StepContext
    number: int
    parts: tuple[Output, ...]
    chain: tuple[_RunIndex, ...]


def find_selected_before(
    scratch: StepContext,
    bases: Sequence[str],
    step: str,
    hashed: Sequence[Commit],
    distribute: Distribute,
) -> list[tuple[Output, ...]]:
    """Return the lists of each bucket's ids that a run among the `bases` has selected.

    `hashed` are the commits of the buckets' ids, in ranges.
    """
    indexes = [_RunIndex.of(base, _selection(scratch.store, base, step)) for base in bases]
    ranges = list(zip(*(commit.outputs for commit in hashed), strict=True))
    tasks = [
        _RangeTask(
            scratch, number, parts, tuple(each.part(number, len(ranges)) for each in indexes)
        )
        for number, parts in enumerate(ranges)
    ]
    found: list[list[Output]] = [[] for _ in hashed]
    for by_bucket in distribute(tasks, _find_in_range, "look for what was selected before"):
        for bucket, output in by_bucket.items():
            found[bucket].append(output)
    return list(map(tuple, found))


def _selection(store: ObjectStore, run_uri: str, step: str) -> Manifest:
    manifest = read_manifest(store, run_uri, step)
    if own_outputs(manifest.outputs) and not manifest.id_index:
        raise ValueError(
            f"{run_uri}: {step} has no id index, as an earlier version made it: an increment "
            "cannot tell what it has selected; select again into a new --run, and extend that one"
        )
    return manifest


def _find_in_range(task: _RangeTask) -> dict[int, Output]:
    read = partial(_read_range, task.context)
    buckets = [part for _, part in prefetch(read, task.parts, _GETS_IN_FLIGHT)]
    before = [np.empty(0, np.uint64)]
    for each in task.chain:
        before.append(
            each.selected([part for _, part in prefetch(read, each.ranges, _GETS_IN_FLIGHT)])
        )
    selected = np.unique(np.concatenate(before))
    stored = {}
    for bucket, part in enumerate(buckets):
        ids = np.unique(part.hashes)
        ids = ids[np.isin(ids, selected, assume_unique=True)]
        if len(ids):
            name = f"before-{task.number:05d}-of-{bucket:05d}"
            data = ids.astype("<u8").tobytes()
            stored[bucket] = task.context.put_output(name, ".before", data, Tally())
    return stored


def _read_range(context: StepContext, output: Output) -> IdRange:
    return IdRange.from_bytes(read_output(context.store, context.run_uri, output))
