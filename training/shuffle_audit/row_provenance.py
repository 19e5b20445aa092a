"""Where the rows of training partitions come from: file, speaker, place before the shuffles."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float64, Int64

from infra.store.checked_reads import scan_checked
from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit.provenance import Sources
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import read_partition_origins

LINE_BITS = 20
"""A selection file of 2^20 utterances would be one of 58 days."""


@dataclass(frozen=True, slots=True, eq=False)
class Origins:
    """Of each row of a partition: selection file, speaker, place in the source, mean log Z."""

    files: Int64[np.ndarray, " rows"]
    speakers: Int64[np.ndarray, " rows"]
    places: Int64[np.ndarray, " rows"]
    values: Float64[np.ndarray, " rows"]


@dataclass(frozen=True, slots=True, eq=False)
class SelectionFile:
    """The line of each utterance, and the chance that two moments are of one speaker."""

    lines: dict[str, int]
    same_speaker: float


# A group of source shards is read for each of its partitions; 256 files are some 150 MB.
@lru_cache(maxsize=256)
def read_selection_file(store: ObjectStore, run_uri: str, output: Output) -> SelectionFile:
    """Index one selection file by utterance."""
    lines: dict[str, int] = {}
    seconds: Counter[str] = Counter()
    for number, line in enumerate(read_output(store, run_uri, output).splitlines()):
        fields = json.loads(line)
        lines[fields["utterance_id"]] = number
        seconds[fields["speaker_id"]] += fields["duration_s"]
    total = sum(seconds.values())
    return SelectionFile(lines, sum((each / total) ** 2 for each in seconds.values()))


class OriginReader:
    """Origins of partitions' rows; reads each partition's small columns once."""

    def __init__(self, store: ObjectStore, run_uri: str, sources: Sources) -> None:
        self._store, self._run_uri, self._sources = store, run_uri, sources
        self._ranks = sources.source_ranks()
        self._speakers: dict[str, int] = {}
        self._known: dict[str, Origins] = {}
        self._same_speaker: dict[int, float] = {}

    def same_speaker(self) -> float:
        """The chance that two moments of one file are of one speaker, mean over files seen."""
        return float(np.mean(list(self._same_speaker.values())))

    def of(self, partition: Output) -> Origins:
        """The origins of a partition's rows, in stored order."""
        if partition.key not in self._known:
            self._known[partition.key] = self._read(partition)
        return self._known[partition.key]

    def _read(self, partition: Output) -> Origins:
        uri = join_uri(self._run_uri, partition.key)
        utterances, speakers, values = scan_checked(self._store, uri, read_partition_origins)
        found = self._find(partition, set(utterances))
        missing = set(utterances) - found.keys()
        if missing:
            num_files = len(self._sources.files_of(partition))
            raise ValueError(
                f"{partition.key}: {min(missing)} is in none of its {num_files} source files: "
                "another version made the partitions; repartition into a fresh --run"
            )
        numbers = [self._speakers.setdefault(name, len(self._speakers)) for name in speakers]
        files, places = zip(*(found[name] for name in utterances), strict=True)
        return Origins(
            np.array(files, np.int64),
            np.array(numbers, np.int64),
            np.array(places, np.int64),
            values,
        )

    def _find(self, partition: Output, wanted: set[str]) -> dict[str, tuple[int, int]]:
        """File and place of the wanted utterances."""
        found = {}
        for number in self._sources.files_of(partition):
            file = read_selection_file(self._store, self._run_uri, self._sources.selection[number])
            self._same_speaker[number] = file.same_speaker
            for name in wanted & file.lines.keys():
                place = self._ranks[number] << LINE_BITS | file.lines[name]
                found[name] = number, place
        return found
