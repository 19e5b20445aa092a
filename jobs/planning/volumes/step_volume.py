"""Define the volume of a step: objects, bytes, requests and work."""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests counts requests to the store by kind."""

    get: float = 0
    put: float = 0
    head: float = 0
    list: float = 0

    @property
    def total(self) -> float:
        """Return the requests of all kinds together."""
        return self.get + self.put + self.head + self.list

    def __add__(self, other: "Requests") -> "Requests":
        return Requests(
            self.get + other.get,
            self.put + other.put,
            self.head + other.head,
            self.list + other.list,
        )


@dataclass(frozen=True, slots=True)
class Work:
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

    def __add__(self, other: "Work") -> "Work":
        names = [field.name for field in fields(self)]
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class Volume:
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

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.tasks + other.tasks,
            self.shards + other.shards,
            self.objects + other.objects,
            self.requests + other.requests,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.work + other.work,
            self.small_reads + other.small_reads,
        )
