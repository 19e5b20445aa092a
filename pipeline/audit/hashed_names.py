"""Hashes of the names that a step's objects hold: on local disk, and compared range by range."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedRandom

import numpy as np
from jaxtyping import Bool, Shaped, UInt32, UInt64

from pipeline.audit.contents import Hashes
from pipeline.steps.selection.hash_ranges import is_among, range_edges

_ROW = np.dtype([("hash", "<u8"), ("place", "<u4")])
Rows = Shaped[np.ndarray, " names"]
"""Hashes, each with the place of its object."""

ROWS_IN_MEMORY = 2**20
"""More names than these are sorted, and written to the temporary folder, 12 bytes a name."""

ROWS_A_RANGE = 2**22
"""Comparisons hold about so many names of a step at a time, some 100 MB."""


@dataclass(frozen=True, slots=True)
class NameRange:
    """NameRange holds hashes by rising value, and by each the place of the object that names it."""

    hashes: UInt64[np.ndarray, " names"]
    places: UInt32[np.ndarray, " names"]

    @classmethod
    def joined(cls, *parts: "NameRange") -> "NameRange":
        """Sort the names of all parts by hash."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)])
        places = np.concatenate([np.empty(0, np.uint32), *(part.places for part in parts)])
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], places[order])

    def those(self, is_wanted: Bool[np.ndarray, " names"]) -> "NameRange":
        """Return the names that are wanted."""
        return NameRange(self.hashes[is_wanted], self.places[is_wanted])


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
            # Without a name in the folder: it is gone when the process ends, however it ends.
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

    def ranges(self, num_ranges: int) -> Iterator[NameRange]:
        """Cut the hashes into ranges of equal width, the same ones for all names; yield each."""
        runs = self._sorted_runs()
        edges = [range_edges(run["hash"], num_ranges) for run in runs]
        for number in range(num_ranges):
            cuts = [slice(*each[number : number + 2].tolist()) for each in edges]
            rows = [run[cut] for run, cut in zip(runs, cuts, strict=True)]
            yield NameRange.joined(*(NameRange(each["hash"], each["place"]) for each in rows))

    def hold(self, hashes: Hashes) -> Bool[np.ndarray, " names"]:
        """Return for each hash whether it is here."""
        is_here = np.zeros(len(hashes), bool)
        for run in self._sorted_runs():
            is_here |= is_among(hashes, run["hash"])
        return is_here


def num_ranges_of(*names: HashedNames) -> int:
    """Return the number of ranges in which these can be compared, ROWS_A_RANGE at a time."""
    return -(-max(map(len, names), default=0) // ROWS_A_RANGE) or 1
