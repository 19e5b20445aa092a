"""What becomes of each metadata record, by itself and beside the others of its bucket."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from infra.store.object_store import ObjectStore
from pipeline.filters import SelectionFilters
from pipeline.metadata import read_records
from pipeline.records import Quarantined, Utterance
from pipeline.sampling import sampling_priority
from pipeline.steps.selection.buckets import Bucket


class Judged(NamedTuple):
    """A record, the filter that rejects it if any, and its priority if it may be drawn."""

    record: Utterance | Quarantined
    rejection: str | None = None
    priority: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides about one record: the same in each pass over the metadata."""

    seed: int
    filters: SelectionFilters

    def judge(self, store: ObjectStore, bucket: Bucket) -> Iterator[Judged]:
        """Judge a bucket's records in the order of its objects and their lines.

        Of the records that pass the filters, the first with an utterance id is kept, the others
        are quarantined: equal 64-bit hashes are taken for equal ids.
        """
        seen: set[int] = set()
        for uri, data in bucket.read(store):
            for num_bytes, record in read_records(data, uri):
                if isinstance(record, Quarantined):
                    yield Judged(record)
                elif (reason := self.filters.rejection(record)) is not None:
                    yield Judged(record, reason)
                elif (priority := sampling_priority(self.seed, record.utterance_id)) in seen:
                    yield Judged(duplicate(record, num_bytes))
                else:
                    seen.add(priority)
                    yield Judged(record, None, priority, num_bytes)


def duplicate(record: Utterance, num_bytes: int) -> Quarantined:
    """The ledger's row for a record whose utterance id an earlier record has."""
    return Quarantined(
        record.utterance_id,
        record.audio_uri,
        "duplicate_utterance",
        "an earlier metadata record has this utterance_id",
        num_bytes,
        record.duration_ms,
    )
