"""The rules that decide about one metadata record: filters, and one record an utterance id."""

from collections.abc import Iterator
from dataclasses import dataclass

from infra.store.object_store import ObjectStore
from pipeline.filters import SelectionFilters
from pipeline.metadata import read_records
from pipeline.records import Quarantined, Utterance
from pipeline.sampling import sampling_priority
from pipeline.steps.selection.buckets import Bucket


@dataclass(frozen=True, slots=True)
class Eligible:
    """A record that may be selected, its priority, and the length of its line."""

    record: Utterance
    priority: int
    num_bytes: int

    def as_duplicate(self, whose: str = "an earlier metadata record") -> Quarantined:
        """Return the ledger row for a record whose utterance id an earlier record has."""
        return Quarantined(
            self.record.utterance_id,
            self.record.audio_uri,
            "duplicate_utterance",
            f"{whose} has this utterance_id",
            self.num_bytes,
            self.record.duration_ms,
        )


@dataclass(frozen=True, slots=True)
class Filtered:
    """A record that the filter named `rule` rejects."""

    record: Utterance
    rule: str


@dataclass(frozen=True, slots=True)
class RecordRules:
    """RecordRules decides about one record, in the same way in each pass over the metadata."""

    seed: int
    filters: SelectionFilters

    def apply(
        self, store: ObjectStore, bucket: Bucket
    ) -> Iterator[Eligible | Filtered | Quarantined]:
        """Decide about a bucket's records in the order of its objects and their lines.

        Of the records that pass the filters, the first with an utterance id is eligible and the
        others are quarantined. Equal 64-bit hashes count as equal ids.
        """
        seen: set[int] = set()
        for uri, data in bucket.read(store):
            for num_bytes, record in read_records(data, uri):
                if isinstance(record, Quarantined):
                    yield record
                    continue
                # Filters come first, so a rejected record makes no other one a duplicate.
                if (rule := self.filters.rejection(record)) is not None:
                    yield Filtered(record, rule)
                    continue
                priority = sampling_priority(self.seed, record.utterance_id)
                eligible = Eligible(record, priority, num_bytes)
                yield eligible.as_duplicate() if priority in seen else eligible
                seen.add(priority)
