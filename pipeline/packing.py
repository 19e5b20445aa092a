"""Pack whole speakers into nearly equal files (paper 003 IV-A1, IV-A3), and objects into runs."""

import heapq
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

MAX_IMBALANCE = 1.05
# So many files that rounding to whole ones moves a group's mean by at most 1.25 %.
MIN_FILES_OF_A_GROUP = 40


def group_buckets(bucket_durations_ms: Sequence[int], file_hours: float) -> list[range]:
    """Group neighbouring buckets, to be packed together, into at least 40 files each.

    If all of them make fewer files, they are one group.
    """
    least_ms = MIN_FILES_OF_A_GROUP * (file_hours * 3_600_000)
    edges, group_ms = [0], 0
    for number, duration_ms in enumerate(bucket_durations_ms, start=1):
        group_ms += duration_ms
        if group_ms >= least_ms:
            edges.append(number)
            group_ms = 0
    # What remains at the end joins the last whole group.
    edges = [*edges[: max(1, len(edges) - 1)], len(bucket_durations_ms)]
    return [range(first, end) for first, end in pairwise(edges)]


def pack_speakers(speaker_durations_ms: Mapping[str, int], file_hours: float) -> list[list[str]]:
    """Give each speaker, the longest first, to the file that is shortest so far.

    Speakers longer than `file_hours` come first, each alone in a file. The others fill as many
    files as make `file_hours` each, none empty. No shared file exceeds the mean of these files by
    more than one speaker's duration.
    """
    target_ms = file_hours * 3_600_000
    speakers = sorted(speaker_durations_ms, key=lambda each: (-speaker_durations_ms[each], each))
    # A speaker is whole in one file (003 IV-A1), so a longer one needs a file alone.
    lone = [speaker for speaker in speakers if speaker_durations_ms[speaker] > target_ms]
    sharing = speakers[len(lone) :]
    num_targets = sum(speaker_durations_ms[speaker] for speaker in sharing) / target_ms
    # Beside lone speakers there may be few other files: rounding down would overfill those.
    num_files = (
        ceil(num_targets / (1 + 0.5 / MIN_FILES_OF_A_GROUP)) if lone else max(1, round(num_targets))
    )
    files: list[list[str]] = [[] for _ in range(min(num_files, len(sharing)))]
    loads = [(0, index) for index in range(len(files))]
    # Graham's longest-processing-time rule: speakers are the jobs, files the machines.
    for speaker in sharing:
        load, index = loads[0]
        heapq.heapreplace(loads, (load + speaker_durations_ms[speaker], index))
        files[index].append(speaker)
    return [*([speaker] for speaker in lone), *files]


@dataclass(frozen=True, slots=True)
class Balance:
    """Balance measures how equal files are.

    `alone_ms` are the files of a single speaker, `largest_shared_ms` is the longest other file.
    """

    num_files: int = 0
    total_ms: int = 0
    largest_shared_ms: int = 0
    alone_ms: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, files: Sequence[Sequence[str]], speaker_durations_ms: Mapping[str, int]
    ) -> "Balance":
        """Measure packed `files`."""
        loads_ms = [sum(speaker_durations_ms[each] for each in file) for file in files]
        shared_ms = [load for file, load in zip(files, loads_ms, strict=True) if len(file) > 1]
        alone_ms = {file[0]: speaker_durations_ms[file[0]] for file in files if len(file) == 1}
        return cls(len(files), sum(loads_ms), max(shared_ms, default=0), alone_ms)

    @classmethod
    def of_groups(cls, groups: Iterable["Balance"]) -> "Balance":
        """Measure the files of several groups as one set of files."""
        parts = list(groups)
        return cls(
            sum(part.num_files for part in parts),
            sum(part.total_ms for part in parts),
            max((part.largest_shared_ms for part in parts), default=0),
            {name: load for part in parts for name, load in part.alone_ms.items()},
        )

    @property
    def mean_ms(self) -> float:
        """Mean length of a file."""
        return self.total_ms / max(1, self.num_files)

    @property
    def imbalance(self) -> float:
        """Largest file over the mean."""
        return self._over_mean(max([self.largest_shared_ms, *self.alone_ms.values()]))

    @property
    def shared_imbalance(self) -> float:
        """Largest file of several speakers over the mean: this packing can bound, to 1.05."""
        return self._over_mean(self.largest_shared_ms)

    @property
    def lone_speakers(self) -> tuple[str, ...]:
        """Speakers who alone exceed 1.05 times the mean."""
        bound_ms = MAX_IMBALANCE * self.mean_ms
        return tuple(sorted(name for name, load in self.alone_ms.items() if load > bound_ms))

    def summary(self) -> dict[str, object]:
        """Numbers and names for a manifest."""
        return {
            "num_files": self.num_files,
            "mean_hours": round(self.mean_ms / 3_600_000, 6),
            "imbalance": round(self.imbalance, 6),
            "shared_imbalance": round(self.shared_imbalance, 6),
            "lone_speakers": list(self.lone_speakers),
        }

    def _over_mean(self, load_ms: int) -> float:
        return load_ms / self.mean_ms if self.total_ms else 1.0


def runs_by_bytes(
    num_bytes: Sequence[int], most_bytes: int, most: int = sys.maxsize
) -> Iterator[slice]:
    """Divide a list into runs of at most so many bytes and elements; one alone may have more."""
    first = total = 0
    for place, size in enumerate(num_bytes):
        if place - first == most or (place > first and total + size > most_bytes):
            yield slice(first, place)
            first, total = place, 0
        total += size
    if first < len(num_bytes):
        yield slice(first, len(num_bytes))
