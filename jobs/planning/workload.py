"""Define the workload of a run, and the units in which the volume of a step is counted.

The workload is its subsets, planned from hours or read from the run's metadata. A volume counts
tasks, objects, requests, bytes and work.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Self

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.manifest import Output, manifest_uri, read_manifest
from pipeline.runs.names import (
    ALL_SUBSETS,
    DEV,
    HELDOUT,
    INGEST_STEP,
    LABELLED,
    METADATA_FOLDER,
    UNLABELLED,
)
from pipeline.steps.selection.buckets import bucket_of

UTTERANCE_SECONDS = 3.6
"""Mean length of an utterance: 1e9 of them are 1e6 hours (003 I)."""

RECORD_BYTES = 200
"""Mean size of a metadata record: 200 GB for 1e9 utterances (003 IV-B1)."""

AUDIO_BYTES_PER_HOUR = 115.2e6
"""16 kHz WAV of 16 bits; FLAC needs about half."""

BUCKET_HOURS = 1_000
"""Planned hours of one speaker bucket: a task of selection then reads 1e6 records."""

METADATA_OBJECT_RECORDS = 100_000
"""Planned records of one metadata object: 20 MB."""

MAX_UTTERANCES_PER_REQUEST = 10_000
"""The largest recording of 512 MB has 9 h; its shortest utterances last 3 s."""

LABELLED_SHARE = 0.007
"""Labelled hours as a share of the unlabelled hours: 7,000 of 1e6 (003 VII-A)."""


@dataclass(frozen=True, slots=True)
class Subset:
    """Subset holds the metadata of one subset by speaker bucket, and the share selected."""

    name: str
    records: int
    metadata_objects: int
    bucket_hours: tuple[float, ...]
    selected: float = 1.0

    @property
    def hours(self) -> float:
        """Return the hours selected."""
        return sum(self.bucket_hours) * self.selected

    @property
    def utterances(self) -> int:
        """Return the number of utterances selected."""
        return max(round(self.records * self.selected), 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload holds all subsets of a run, and the mean sizes of their records and audio.

    One GET reads the audio of so many utterances: one where each is an object of its own, more
    where they are segments of recordings or members of tar files.
    """

    subsets: tuple[Subset, ...]
    record_bytes: float = RECORD_BYTES
    audio_bytes_per_hour: float = AUDIO_BYTES_PER_HOUR
    utterances_per_request: float = 1.0

    def hours(self, subset: str) -> float:
        """Return the hours selected of one subset, 0 if there is none of that name."""
        return sum(each.hours for each in self.subsets if each.name == subset)

    def utterances(self, subset: str) -> int:
        """Return the utterances selected of one subset, 0 if there is none of that name."""
        return sum(each.utterances for each in self.subsets if each.name == subset)


def planned_workload(
    hours: float,
    labelled_hours: float,
    utterance_seconds: float = UTTERANCE_SECONDS,
    dev_hours: float = 0.0,
    heldout_hours: float = 0.0,
    utterances_per_request: float = 1.0,
) -> Workload:
    """Plan the subsets of a corpus before ingestion, all of whose metadata is selected."""
    if not 0 < hours <= 1e9:
        raise ValueError(f"hours = {hours}: need more than 0, at most 1e9")
    others = {LABELLED: labelled_hours, DEV: dev_hours, HELDOUT: heldout_hours}
    for name, some in others.items():
        if not 0 <= some <= 1e9:
            raise ValueError(f"{name} hours = {some}: need 0 or more, at most 1e9")
    if not 0 < utterance_seconds <= 3600:
        raise ValueError(f"utterance seconds = {utterance_seconds}: need more than 0, at most 3600")
    if not 1 <= utterances_per_request <= MAX_UTTERANCES_PER_REQUEST:
        raise ValueError(
            f"utterances per request = {utterances_per_request}: need 1 to "
            f"{MAX_UTTERANCES_PER_REQUEST}, what memory holds of one request's audio"
        )
    subsets = {UNLABELLED: hours, **others}
    return Workload(
        tuple(
            _planned(name, some, max(round(some * 3600 / utterance_seconds), 1))
            for name, some in subsets.items()
            if some
        ),
        utterances_per_request=utterances_per_request,
    )


def _planned(name: str, hours: float, records: int) -> Subset:
    buckets = max(1, round(hours / BUCKET_HOURS))
    objects = max(buckets, ceil(records / METADATA_OBJECT_RECORDS))
    return Subset(name, records, objects, (hours / buckets,) * buckets)


def run_workload(store: ObjectStore, run_uri: str, budget_hours: float) -> Workload | None:
    """Read the subsets of a run, with `budget_hours` to select (0 = all); None before ingestion.

    Filters, speaker caps and bad records are left out.
    """
    if not store.exists(manifest_uri(run_uri, INGEST_STEP)):
        return None
    outputs = read_manifest(store, run_uri, INGEST_STEP).outputs
    by_subset = {
        name: [each for each in outputs if each.key.startswith(f"{METADATA_FOLDER}/{name}/")]
        for name in ALL_SUBSETS
    }
    metadata = [each for some in by_subset.values() for each in some]
    return Workload(
        tuple(
            ingested(name, some, budget_hours if name == UNLABELLED else 0.0)
            for name, some in by_subset.items()
            if some
        ),
        record_bytes=sum(each.num_bytes for each in metadata)
        / max(sum(each.utterances for each in metadata), 1),
    )


def ingested(name: str, metadata: Sequence[Output], budget_hours: float) -> Subset:
    """Return the subset that these metadata objects make."""
    hours: dict[str, float] = defaultdict(float)
    for each in metadata:
        hours[bucket_of(f"/{each.key}")] += each.tally.hours
    total = sum((each.tally for each in metadata), Tally())
    selected = budget_hours / total.hours if budget_hours and total.hours else 1.0
    in_order = tuple(hours[bucket] for bucket in sorted(hours))
    return Subset(name, total.utterances, len(metadata), in_order, min(selected, 1.0))


@dataclass(frozen=True, slots=True)
class _Summed:
    """_Summed is a record whose fields are numbers, or such records, that are added one by one."""

    def __add__(self, other: Self) -> Self:
        names = [each.name for each in fields(self)]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class Requests(_Summed):
    """Requests counts requests to the store by kind."""

    get: float = 0
    put: float = 0
    head: float = 0
    list: float = 0

    @property
    def total(self) -> float:
        """Return the requests of all kinds together."""
        return self.get + self.put + self.head + self.list


@dataclass(frozen=True, slots=True)
class Work(_Summed):
    """Work holds the computation of a step on cores, in the units of the calibration."""

    metadata_records: float = 0
    extracted_seconds: float = 0
    labelled_seconds: float = 0
    repartitioned_seconds: float = 0
    kbest_logits: float = 0
    bootstrapped_seconds: float = 0
    aligned_seconds: float = 0
    lattice_seconds: float = 0
    decoded_seconds: float = 0
    sequence_frames: float = 0
    speed_frames: float = 0
    mask_frames: float = 0


@dataclass(frozen=True, slots=True)
class Volume(_Summed):
    """Volume holds the tasks, shards, objects, requests, bytes and work of a step.

    `objects` counts shards, commits and manifest. A task has several of its `small_reads` in
    flight at once; its other GETs follow one another.
    """

    tasks: int = 0
    shards: int = 0
    objects: int = 0
    requests: Requests = Requests()
    bytes_read: float = 0
    bytes_written: float = 0
    work: Work = field(default_factory=Work)
    small_reads: float = 0
