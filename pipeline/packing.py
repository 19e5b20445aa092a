"""Pack whole speakers into nearly equal files (paper 003 IV-A1, IV-A3), and objects into runs."""

import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
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
