"""Read the utterances of a stored object: ids and declared milliseconds, without tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt64

from pipeline.records import parse_utterance
from pipeline.runs.json_lines import QUARANTINED, read_lines
from pipeline.runs.names import LEDGER_SUFFIX
from pipeline.sampling import hash_name
from pipeline.shards.container import read_plain_columns

Hashes = UInt64[np.ndarray, " _names"]


@dataclass(frozen=True, slots=True)
class AudioVersion:
    """AudioVersion is the audio that a feature row was made of: its URI, and its ETag then.

    The ETag of a part, as a shard writes it, is of the part's bytes alone.
    """

    uri: str
    etag: str
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """An object's utterances, in stored order; target shards do not repeat the durations.

    Selection files hold speakers too, feature shards the audio that extraction read, and ledgers
    reasons.
    """

    utterance_ids: list[str]
    duration_ms: int | None
    speaker_ids: tuple[str, ...] = ()
    audio: tuple[AudioVersion, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)


def hash_names(names: Sequence[str]) -> Hashes:
    """Hash each name to 64 bits: a billion utterances are 8 GB."""
    return np.array([hash_name(each) for each in names], np.uint64)


def read_contents(key: str, data: bytes) -> Contents | None:
    """Read the utterances of the object at `key`; None for an object without, such as a model.

    ValueError for bytes in another format than the key's suffix states.
    """
    if key.endswith(LEDGER_SUFFIX):
        rows = list(read_lines(data, QUARANTINED))
        ids = [row["utterance_id"] for row in rows]
        duration_ms = sum(row["duration_ms"] for row in rows)
        return Contents(ids, duration_ms, reasons=Counter(row["reason"] for row in rows))
    if key.endswith(".jsonl"):
        utterances = [parse_utterance(line.decode()) for line in data.splitlines()]
        ids = [utterance.utterance_id for utterance in utterances]
        speakers = dict.fromkeys(utterance.speaker_id for utterance in utterances)
        return Contents(ids, sum(each.duration_ms for each in utterances), tuple(speakers))
    if key.endswith(".parquet"):
        names = ("utterance_id", "duration_ms", "audio_uri", "audio_etag", "audio_part")
        columns, _ = read_plain_columns(data, names)
        durations_ms = columns.get("duration_ms")
        total_ms = None if durations_ms is None else sum(durations_ms)
        uris, etags = columns.get("audio_uri", []), columns.get("audio_etag", [])
        parts = columns.get("audio_part", [None] * len(uris))
        audio = tuple(map(AudioVersion, uris, etags, parts))
        return Contents(columns["utterance_id"], total_ms, audio=audio)
    return None
