"""Find the provenance of training partitions' rows: file, speaker, position before the shuffles."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float64, Int64

from infra.store.object_store import ObjectStore, scan_checked
from pipeline.audit.provenance import Provenance
from pipeline.runs.ledger import SELECTED, read_lines
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import read_partition_provenance

LINE_BITS = 20
"""Bits of a line's number; a selection file of 2^20 utterances would hold 58 days of speech."""


@dataclass(frozen=True, slots=True, eq=False)
class RowProvenance:
    """RowProvenance holds each row's selection file, speaker, source position and mean log Z."""

    files: Int64[np.ndarray, " rows"]
    speakers: Int64[np.ndarray, " rows"]
    positions: Int64[np.ndarray, " rows"]
    mean_log_z: Float64[np.ndarray, " rows"]


@dataclass(frozen=True, slots=True, eq=False)
class SelectionIndex:
    """SelectionIndex maps utterances to the lines of a selection file.

    `same_speaker` is the probability that two moments of the file are of one speaker.
    """

    lines: dict[str, int]
    same_speaker: float


# A group of source shards is read for each of its partitions; 256 files are some 150 MB.
@lru_cache(maxsize=256)
def read_selection_file(store: ObjectStore, run_uri: str, output: Output) -> SelectionIndex:
    """Index one selection file by utterance."""
    lines: dict[str, int] = {}
    seconds: Counter[str] = Counter()
    for number, fields in enumerate(read_lines(read_output(store, run_uri, output), SELECTED)):
        lines[fields["utterance_id"]] = number
        seconds[fields["speaker_id"]] += fields["duration_s"]
    total = sum(seconds.values())
    # Two moments fall on one speaker with the sum of squared shares of the speech.
    return SelectionIndex(lines, sum((each / total) ** 2 for each in seconds.values()))


class ProvenanceReader:
    """ProvenanceReader finds the provenance of rows; it reads each partition's columns once."""

    def __init__(self, store: ObjectStore, run_uri: str, sources: Provenance) -> None:
        self._store, self._run_uri, self._sources = store, run_uri, sources
        self._ranks = sources.source_ranks()
        self._speakers: dict[str, int] = {}
        self._partitions: dict[str, RowProvenance] = {}
        self._same_speaker: dict[int, float] = {}

    def same_speaker(self) -> float:
        """Return the probability that two moments of a file read so far are of one speaker."""
        return float(np.mean(list(self._same_speaker.values())))

    def read(self, partition: Output) -> RowProvenance:
        """Return the provenance of a partition's rows, in stored order.

        Raises ValueError for an utterance that is in none of the partition's source files.
        """
        if partition.key not in self._partitions:
            self._partitions[partition.key] = self._read_columns(partition)
        return self._partitions[partition.key]

    def _read_columns(self, partition: Output) -> RowProvenance:
        uri = partition.uri(self._run_uri)
        utterances, speakers, mean_log_z = scan_checked(self._store, uri, read_partition_provenance)
        found = self._find_sources(partition, set(utterances))
        missing = set(utterances) - found.keys()
        if missing:
            num_files = len(self._sources.files_of(partition))
            raise ValueError(
                f"{partition.key}: {min(missing)} is in none of its {num_files} source files: "
                "another version made the partitions; repartition into a fresh --run"
            )
        numbers = [self._speakers.setdefault(name, len(self._speakers)) for name in speakers]
        files, positions = zip(*(found[name] for name in utterances), strict=True)
        return RowProvenance(
            np.array(files, np.int64),
            np.array(numbers, np.int64),
            np.array(positions, np.int64),
            mean_log_z,
        )

    def _find_sources(self, partition: Output, wanted: set[str]) -> dict[str, tuple[int, int]]:
        """Return the file's number and the source position of each of the wanted utterances."""
        found = {}
        for number in self._sources.files_of(partition):
            index = read_selection_file(self._store, self._run_uri, self._sources.selection[number])
            self._same_speaker[number] = index.same_speaker
            for name in wanted & index.lines.keys():
                # Files in source order, then lines within the file.
                position = self._ranks[number] << LINE_BITS | index.lines[name]
                found[name] = number, position
        return found
