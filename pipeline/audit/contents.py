"""Read the utterances of a stored object: ids and declared milliseconds, without tensors."""

import json
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt64

from pipeline.records import parse_utterance
from pipeline.runs.names import LEDGER_SUFFIX
from pipeline.sampling import sampling_priority
from pipeline.shards.container import read_plain_columns

_HASH_SEED = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """An object's utterances, in stored order; target shards do not repeat the durations."""

    utterance_ids: list[str]
    duration_ms: int | None

    def hashes(self) -> UInt64[np.ndarray, " utterances"]:
        """Hash each id to 64 bits: a billion utterances are 8 GB."""
        return np.array(
            [sampling_priority(_HASH_SEED, each) for each in self.utterance_ids], np.uint64
        )


def read_contents(key: str, data: bytes) -> Contents | None:
    """Read the utterances of the object at `key`; None for an object without, such as a model.

    ValueError for bytes in another format than the key's suffix states.
    """
    if key.endswith(LEDGER_SUFFIX):
        rows = [json.loads(line) for line in data.splitlines()]
        return Contents([row["utterance_id"] for row in rows], sum(r["duration_ms"] for r in rows))
    if key.endswith(".jsonl"):
        utterances = [parse_utterance(line.decode()) for line in data.splitlines()]
        ids = [utterance.utterance_id for utterance in utterances]
        return Contents(ids, sum(utterance.duration_ms for utterance in utterances))
    if key.endswith(".parquet"):
        columns, _ = read_plain_columns(data, ("utterance_id", "duration_ms"))
        durations_ms = columns.get("duration_ms")
        total_ms = None if durations_ms is None else sum(durations_ms)
        return Contents(columns["utterance_id"], total_ms)
    return None
