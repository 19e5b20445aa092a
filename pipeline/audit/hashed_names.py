"""Compare billions of names by 64-bit hashes, which lie on local disk, range by range.

An `IdRange` holds a range of hashes by rising value; its `objects` are the places of the objects
that name them, among those of a step.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedRandom

import numpy as np
from jaxtyping import Bool, Shaped, UInt64

from pipeline.steps.hash_ranges import is_among, range_edges
from pipeline.steps.selection.id_index import IdRange

Hashes = UInt64[np.ndarray, " _names"]

_ROW = np.dtype([("hash", "<u8"), ("place", "<u4")])
Rows = Shaped[np.ndarray, " names"]
"""Hashes, each with the place of its object."""

ROWS_IN_MEMORY = 2**20
"""More names than these are sorted, and written to the temporary folder, 12 bytes a name."""

ROWS_A_RANGE = 2**22
"""Comparisons hold about so many names of a step at a time, some 100 MB."""


@dataclass(slots=True)
class HashedNames:
    """HashedNames holds a hash of each name, and the place of its object among those of a step.

    Up to ROWS_IN_MEMORY are in memory. A billion names are 12 GB in the temporary folder.
    """

    _recent: list[Rows] = field(default_factory=list)
    _num_recent: int = 0
    _file: BufferedRandom | None = None
    _run_lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Count the names, each as often as it was added."""
        return sum(self._run_lengths) + self._num_recent

    def add(self, hashes: Hashes, place: int = 0) -> None:
        """Add the names of the object at `place`."""
        rows = np.empty(len(hashes), _ROW)
        rows["hash"], rows["place"] = hashes, place
        self._recent.append(rows)
        self._num_recent += len(rows)
        if self._num_recent > ROWS_IN_MEMORY:
            # It has no name in the folder, so that it is gone whenever the process ends.
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - kept open
            self._file.write(self._sorted_recent().tobytes())
            self._run_lengths.append(self._num_recent)
            self._recent, self._num_recent = [], 0

    def clear(self) -> None:
        """Forget all names."""
        self._recent, self._num_recent, self._run_lengths, self._file = [], 0, [], None

    def _sorted_recent(self) -> Rows:
        rows = np.concatenate([np.empty(0, _ROW), *self._recent])
        return rows[np.argsort(rows["hash"], kind="stable")]

    def _sorted_runs(self) -> list[Rows]:
        self._recent = [self._sorted_recent()]
        if self._file is None:
            return self._recent
        self._file.flush()
        stored = np.memmap(self._file, _ROW, "r")
        return [*np.split(stored, np.cumsum(self._run_lengths)[:-1]), *self._recent]

    def ranges(self, num_ranges: int) -> Iterator[IdRange]:
        """Cut the hashes into ranges of equal width, the same ones for all names; yield each."""
        runs = self._sorted_runs()
        edges = [range_edges(run["hash"], num_ranges) for run in runs]
        for number in range(num_ranges):
            cuts = [slice(*each[number : number + 2].tolist()) for each in edges]
            rows = [run[cut] for run, cut in zip(runs, cuts, strict=True)]
            yield IdRange.merged([IdRange(each["hash"], each["place"]) for each in rows])

    def hold(self, hashes: Hashes) -> Bool[np.ndarray, " _names"]:
        """Return for each hash whether it is here."""
        is_here = np.zeros(len(hashes), bool)
        for run in self._sorted_runs():
            is_here |= is_among(hashes, run["hash"])
        return is_here


def those(names: IdRange, is_wanted: Bool[np.ndarray, " _names"]) -> IdRange:
    """Return the names that are wanted."""
    return IdRange(names.hashes[is_wanted], names.objects[is_wanted])


def names_in_ranges(names: Sequence[HashedNames], num_ranges: int) -> Iterator[IdRange]:
    """Yield range by range of hashes what several hold together."""
    for parts in zip(*(each.ranges(num_ranges) for each in names), strict=True):
        yield IdRange.merged(parts)


def names_twice(names: Sequence[HashedNames]) -> Iterator[IdRange]:
    """Yield range by range the names that are there more than once, with all of their objects."""
    for found in names_in_ranges(names, _num_ranges(names)):
        unique, counts = np.unique(found.hashes, return_counts=True)
        yield those(found, is_among(found.hashes, unique[counts > 1]))


def names_without(
    names: Sequence[HashedNames], others: Sequence[HashedNames], are_shared: bool = False
) -> Iterator[IdRange]:
    """Yield range by range the names that are not among the others; or, `are_shared`, that are."""
    num_ranges = _num_ranges([*names, *others])
    both = (names_in_ranges(each, num_ranges) for each in (names, others))
    for own, other in zip(*both, strict=True):
        yield those(own, is_among(own.hashes, other.hashes) == are_shared)


def _num_ranges(names: Sequence[HashedNames]) -> int:
    """Return the number of ranges in which these can be compared, ROWS_A_RANGE at a time."""
    return -(-max(map(len, names), default=0) // ROWS_A_RANGE) or 1
