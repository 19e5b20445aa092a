"""Whole speakers into nearly equal files (paper 003 IV-A1, IV-A3)."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_IMBALANCE = 1.05


def pack_speakers(speaker_durations_ms: Mapping[str, int], file_hours: float) -> list[list[str]]:
    """Give each speaker, the longest first, to the file that is shortest so far.

    As many files as make `file_hours` each, none empty. No file exceeds the mean by more than
    one speaker's duration.
    """
    if not file_hours > 0:
        raise ValueError(f"file_hours = {file_hours}: need more than 0")
    speakers = sorted(speaker_durations_ms, key=lambda each: (-speaker_durations_ms[each], each))
    num_files = max(1, round(sum(speaker_durations_ms.values()) / (file_hours * 3_600_000)))
    files: list[list[str]] = [[] for _ in range(min(num_files, len(speakers)))]
    loads = [(0, index) for index in range(len(files))]
    for speaker in speakers:
        load, index = loads[0]
        heapq.heapreplace(loads, (load + speaker_durations_ms[speaker], index))
        files[index].append(speaker)
    return files


@dataclass(frozen=True, slots=True)
class Balance:
    """How equal the files came out; lone speakers exceed the bound in a file of their own."""

    largest_ms: int
    mean_ms: float
    lone_speakers: tuple[str, ...]

    @property
    def imbalance(self) -> float:
        """Largest file over the mean."""
        return self.largest_ms / self.mean_ms if self.mean_ms else 1.0

    def to_dict(self) -> dict[str, float | list[str]]:
        """Return numbers and names for a manifest."""
        return {"imbalance": self.imbalance, "lone_speakers": list(self.lone_speakers)}


def balance(files: Sequence[Sequence[str]], speaker_durations_ms: Mapping[str, int]) -> Balance:
    """Compare the files with their mean; report speakers that alone exceed 1.05 times it."""
    loads = [sum(speaker_durations_ms[each] for each in file) for file in files]
    mean_ms = sum(loads) / max(1, len(loads))
    lone = [
        file[0]
        for file, load in zip(files, loads, strict=True)
        if len(file) == 1 and load > MAX_IMBALANCE * mean_ms
    ]
    return Balance(max(loads, default=0), mean_ms, tuple(lone))
