"""List, digest and read the metadata objects of speaker buckets.

Rules decide about each record that is read: the filters, and one record per utterance id. Ingestion
refuses a corpus with metadata that the step did not write; of what it did, the driver has hashes.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import chain, islice
from types import MappingProxyType

import numpy as np
from jaxtyping import UInt64

from infra.store.object_store import (
    ObjectInfo,
    ObjectStore,
    StoreError,
    join_uri,
    normalize_uri,
    read_checked,
)
from pipeline.filters import SelectionFilters
from pipeline.metadata import read_records
from pipeline.records import Quarantined, Utterance
from pipeline.runs.engine import Distribute
from pipeline.runs.manifest import (
    Output,
    Outputs,
    OutputsInParts,
    is_finished,
    read_manifest,
    sha256,
)
from pipeline.runs.names import ALL_SUBSETS, INGEST_STEP, METADATA_FOLDER, SUBSETS, bucket_of
from pipeline.sampling import hash_names, sampling_priority
from pipeline.steps.hash_ranges import is_among

METADATA_SUFFIXES = (".jsonl", ".jsonl.gz")

NOTHING_INGESTED: Mapping[str, int] = MappingProxyType({})
"""The bytes of metadata objects by name, of a run that reads another's corpus."""

# A task holds this many metadata objects at a time.
_GETS_IN_FLIGHT = 4
# Writers of metadata leave these beside it: success marks, checksums, and folders' marks.
_MARKS = re.compile(r"_SUCCESS|\..*|.*_\$folder\$")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bucket holds the objects with all records of its speakers, of any date."""

    name: str
    uris: tuple[str, ...]
    digests: tuple[str, ...]

    def read(self, store: ObjectStore) -> Iterator[tuple[str, bytes]]:
        """Yield each object's URI and bytes; ValueError if one changed since it was digested."""
        objects = _read(store, self.uris)
        for (uri, data), digest in zip(objects, self.digests, strict=True):
            # Passes that read other bytes would judge differently, and lose or double records.
            again = partial(read_checked, store, uri, partial(_require_unchanged, digest))
            yield uri, data if sha256(data) == digest else again()


def list_metadata(
    store: ObjectStore, metadata_uri: str, ingested: Mapping[str, int] = NOTHING_INGESTED
) -> dict[str, list[ObjectInfo]]:
    """List the metadata objects of each bucket; buckets and objects are in the order of names.

    ValueError names an object that is neither metadata by its suffix nor a known mark of writers,
    and one that was `ingested` and is not listed with its bytes.
    """
    objects = [found for found in store.list(metadata_uri) if not is_mark(found)]
    base = f"{normalize_uri(metadata_uri)}/"
    listed = {each.uri.removeprefix(base): each.num_bytes for each in objects}
    if missing := sorted(ingested.keys() - listed.keys()):
        raise ValueError(
            f"{metadata_uri}: ingest wrote {len(ingested)} metadata objects, and the listing lacks "
            f"{len(missing)} of them, such as {missing[0]}: put back what was removed, set the "
            "corpus.uri that ingest had, or use a store that lists all that it holds"
        )
    for name, num_bytes in ingested.items():
        if listed[name] != num_bytes:
            raise ValueError(
                f"{base}{name} has {listed[name]} bytes, and ingest wrote {num_bytes}: put the "
                "object back, or ingest into a new --run"
            )
    for found in objects:
        if not found.uri.endswith(METADATA_SUFFIXES):
            raise ValueError(
                f"{found.uri} is no metadata by its name: need {' or '.join(METADATA_SUFFIXES)}; "
                "convert it, or move it out of the folder"
            )
    if not objects:
        raise ValueError(
            f"{metadata_uri} holds no *.jsonl metadata: run megahour ingest, or set corpus.uri"
        )
    buckets = defaultdict(list)
    for found in objects:
        buckets[bucket_of(found.uri)].append(found)
    return dict(sorted(buckets.items()))


def ingested_metadata(
    store: ObjectStore, run_uri: str, distribute: Distribute
) -> dict[str, dict[str, int]]:
    """Return by subset what the run has ingested itself: each metadata object's name and bytes.

    A run without an ingestion of its own, as of another's corpus, has none.
    """
    if not is_finished(store, run_uri, INGEST_STEP):
        return {}
    outputs = read_manifest(store, run_uri, INGEST_STEP).outputs
    if isinstance(outputs, OutputsInParts):
        found = distribute(outputs.by_part(), metadata_among, "find the metadata of ingest")
    else:
        found = [metadata_among(outputs)]
    by_subset: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for subset, name, num_bytes in chain.from_iterable(found):
        by_subset[subset][name] = num_bytes
    return dict(by_subset)


def metadata_among(outputs: Iterable[Output]) -> list[tuple[str, str, int]]:
    """Return the subset, the name below its folder and the bytes of each metadata object."""
    folder = f"{METADATA_FOLDER}/"
    keys = ((each.key.removeprefix(folder).partition("/"), each) for each in outputs)
    return [
        (subset, name, each.num_bytes)
        for (subset, _, name), each in keys
        if each.key.startswith(folder)
    ]


def within_dates(
    listing: Mapping[str, list[ObjectInfo]],
    metadata_uri: str,
    filters: SelectionFilters,
    *,
    may_be_none: bool = False,
) -> dict[str, list[ObjectInfo]]:
    """Leave out the objects whose folder `date=...` no record within the filters' dates can be in.

    ValueError if none is left, unless there `may_be_none`. An object without such a folder may hold
    any date.
    """
    base = f"{normalize_uri(metadata_uri)}/"
    kept = {
        bucket: [
            found for found in objects if is_within_dates(found.uri.removeprefix(base), filters)
        ]
        for bucket, objects in listing.items()
    }
    if not may_be_none and not any(kept.values()):
        uris = sorted(found.uri for objects in listing.values() for found in objects)
        raise ValueError(
            f"created_from = {filters.created_from!r}, created_before = "
            f"{filters.created_before!r}: no metadata is in a date=... folder of such a day, from "
            f"{uris[0]} to {uris[-1]}; choose other days, or date_folders = false"
        )
    return {bucket: objects for bucket, objects in kept.items() if objects}


def is_within_dates(name: str, filters: SelectionFilters) -> bool:
    """Return whether a metadata object may hold a record within the filters' dates.

    Its name is what follows the metadata's folder, as the corpus itself may lie below a folder of
    a date.
    """
    match = re.match(r"(?:.*/)?date=(\d{4}-\d{2}-\d{2})/", name)
    try:
        return match is None or filters.reaches(date.fromisoformat(match[1]))
    except ValueError:  # no day of the calendar
        return True


def require_known_subsets(store: ObjectStore, corpus_uri: str) -> None:
    """Raise ValueError for metadata in no subset's folder, which no selection would read."""
    base = join_uri(corpus_uri, METADATA_FOLDER)
    for found in store.list(base):
        subset = found.uri.removeprefix(f"{base}/").partition("/")[0]
        if subset not in ALL_SUBSETS and not is_mark(found):
            raise ValueError(
                f"{found.uri} is in no subset's folder: need {METADATA_FOLDER}/ and one of "
                f"{', '.join(ALL_SUBSETS)}; rename the folder, or move it out of {METADATA_FOLDER}/"
            )


def subsets_of(
    store: ObjectStore, corpus_uri: str, ingested: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the subsets of a corpus that have metadata, or should have as they were `ingested`.

    Where none has any, these are the three of a whole corpus, so that a step names what is missing.
    """
    base = join_uri(corpus_uri, METADATA_FOLDER)
    found = tuple(
        subset
        for subset in ALL_SUBSETS
        if subset in ingested
        or any(not is_mark(each) for each in store.list(join_uri(base, subset)))
    )
    return found or SUBSETS


def is_mark(found: ObjectInfo) -> bool:
    """Return True for what writers leave beside metadata, and no selection reads."""
    return _MARKS.fullmatch(found.uri.rpartition("/")[2]) is not None


def digest_buckets(
    store: ObjectStore,
    listing: Mapping[str, list[ObjectInfo]],
    distribute: Distribute,
    description: str,
) -> list[Bucket]:
    """Digest every metadata object, one task a bucket."""
    tasks = [(store, tuple(found.uri for found in objects)) for objects in listing.values()]
    digests = distribute(tasks, digest_objects, description)
    return [
        Bucket(name, uris, found)
        for name, (_, uris), found in zip(listing, tasks, digests, strict=True)
    ]


def digest_objects(task: tuple[ObjectStore, tuple[str, ...]]) -> tuple[str, ...]:
    """Compute the SHA-256 of each object."""
    return tuple(sha256(data) for _, data in _read(*task))


def input_digests_of(buckets: list[Bucket], metadata_uri: str) -> dict[str, str]:
    """Return the digests by name below `metadata_uri`, so that a corpus may be moved."""
    base = normalize_uri(metadata_uri)
    return {
        uri.removeprefix(base): digest
        for bucket in buckets
        for uri, digest in zip(bucket.uris, bucket.digests, strict=True)
    }


def _require_unchanged(digest: str, data: bytes) -> bytes:
    if sha256(data) != digest:
        raise ValueError(
            "changed during the selection: leave the metadata as it is, or select into a new --run"
        )
    return data


def _read(store: ObjectStore, uris: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for uri, found in store.get_many(uris, _GETS_IN_FLIGHT):
        if isinstance(found, StoreError):
            raise found
        yield uri, found.data


@dataclass(frozen=True, slots=True)
class Eligible:
    """A record that may be selected, its priority, and the length of its line."""

    record: Utterance
    priority: int
    num_bytes: int

    def as_duplicate(self, whose: str = "an earlier metadata record") -> Quarantined:
        """Return the ledger row for a record whose utterance id an earlier record has."""
        detail = f"{whose} has this utterance_id"
        return Quarantined.of(self.record, "duplicate_utterance", detail, self.num_bytes)


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


OBJECTS_AT_A_TIME = 10_000
"""So many listed objects are compared at a time, 5 MB."""

Hashes = UInt64[np.ndarray, " objects"]


def require_only(
    store: ObjectStore, corpus_uri: str, outputs: Outputs, distribute: Distribute
) -> None:
    """Raise ValueError for metadata in the corpus that is not among a step's outputs.

    They are compared by 64 bits: beside a hundred million outputs, another object is overlooked
    once in 10^11 cases.
    """
    hash_uris = partial(hash_uris_of, corpus_uri)
    if isinstance(outputs, OutputsInParts):
        hashes = distribute(outputs.by_part(), hash_uris, "hash the names of objects")
    else:
        hashes = [hash_uris(outputs)]
    ours = np.sort(np.concatenate(hashes))
    listed = store.list_each(join_uri(corpus_uri, METADATA_FOLDER))
    uris = (found.uri for found in listed if not is_mark(found))
    while some := list(islice(uris, OBJECTS_AT_A_TIME)):
        is_ours = is_among(hash_names(some), ours)
        if not is_ours.all():
            uri = some[int(np.argmin(is_ours))]
            remedy = "use another corpus.uri, or remove the corpus there"
            raise ValueError(f"{uri} is from another corpus than these manifests: {remedy}")


def hash_uris_of(corpus_uri: str, outputs: Iterable[Output]) -> Hashes:
    """Hash the URIs of some outputs to 64 bits each."""
    return hash_names(join_uri(corpus_uri, output.key) for output in outputs)
