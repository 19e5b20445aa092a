"""The draw: a verdict on every metadata record, whatever objects the records lie in (003 IV-B1)."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt8, UInt64

from infra.object_store import ObjectStore
from pipeline.records import MetadataError, Quarantined, Utterance, parse_utterance
from pipeline.sampling import (
    DurationStatistics,
    oversampling_threshold,
    sampling_priority,
    select_to_budget,
)
from pipeline.steps.manifest import sha256

UNSELECTED, SELECTED, DUPLICATE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class MetadataSummary:
    """What the draw needs of one metadata object: a priority and a duration per good record.

    `speakers` are 64-bit hashes, each once; `num_records` counts bad records too.
    """

    digest: str
    num_records: int
    speakers: UInt64[np.ndarray, " speakers"]
    priorities: UInt64[np.ndarray, " records"]
    durations_ms: Int64[np.ndarray, " records"]


def uncompressed(data: bytes, uri: str) -> bytes:
    """The text of a metadata object; ValueError names one that is not the gzip it claims to be."""
    if not uri.endswith(".gz"):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{uri}: no whole gzip file: {error}; write it again") from error


def read_records(data: bytes, uri: str) -> Iterator[tuple[str, Utterance | Quarantined]]:
    """Each line of a metadata object with what it parses to; blank lines are no records."""
    for line in uncompressed(data, uri).decode("utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            yield line, parse_utterance(line)
        except MetadataError as error:
            yield line, Quarantined.from_error(error, len(line))


def summarize_metadata(source: tuple[ObjectStore, int, str]) -> MetadataSummary:
    """Read one metadata object and keep what the draw needs of its good records."""
    store, seed, uri = source
    data = store.get(uri)
    records = [record for _, record in read_records(data, uri)]
    good = [record for record in records if isinstance(record, Utterance)]
    speakers = {sampling_priority(seed, record.speaker_id) for record in good}
    return MetadataSummary(
        sha256(data),
        len(records),
        np.array(sorted(speakers), np.uint64),
        np.array([sampling_priority(seed, record.utterance_id) for record in good], np.uint64),
        np.array([record.duration_ms for record in good], np.int64),
    )


def draw(
    summaries: Sequence[MetadataSummary], hours: float
) -> list[UInt8[np.ndarray, " _records"]]:
    """A verdict on every good record: unselected, selected, or a duplicate of an earlier one."""
    priorities = np.concatenate([summary.priorities for summary in summaries])
    durations_ms = np.concatenate([summary.durations_ms for summary in summaries])
    # A priority is a 64-bit hash of the utterance id: equal priorities are equal ids.
    _, first = np.unique(priorities, return_index=True)
    verdicts = np.full(len(priorities), DUPLICATE, np.uint8)
    verdicts[first] = UNSELECTED
    budget_ms = round(hours * 3_600_000)
    threshold = oversampling_threshold(DurationStatistics.of(durations_ms[first]), budget_ms)
    # Below the threshold lies mildly more than the budget: the rest need not be sorted.
    candidates = first[priorities[first] <= np.uint64(threshold - 1)]
    chosen = select_to_budget(priorities[candidates], durations_ms[candidates], budget_ms)
    verdicts[candidates[chosen]] = SELECTED
    edges = np.cumsum([len(summary.priorities) for summary in summaries])[:-1]
    return np.split(verdicts, edges)
