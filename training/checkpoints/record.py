"""Define a checkpoint: one object a rank, and a sealed record that names them all."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, read_checked
from pipeline.runs.sealed_json import read_sealed, seal, typed_record
from training.checkpoints.place import Place
from training.tensor_encoding import decode_state

R = TypeVar("R")

OF_A_CHECKPOINT = re.compile(r"\d{12}(\.json|-rank-\d{5}-[0-9a-f]{16}\.npz)|\.partial-[^/]+")
"""Keys that a checkpoint's writer makes, and the files that a killed writer leaves."""


class DamagedCheckpointError(ValueError):
    """DamagedCheckpointError: an object is missing, or is not what its checkpoint's record says."""


@dataclass(frozen=True, slots=True)
class RankObject:
    """RankObject names one rank's stored state: key below the checkpoints, size and digest."""

    key: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, step: int, rank: int, data: bytes) -> "RankObject":
        """Name the state after `step` steps by its digest: other bytes never overwrite it."""
        digest = hashlib.sha256(data).hexdigest()
        return cls(f"{step:012d}-rank-{rank:05d}-{digest[:16]}.npz", len(data), digest)

    def read(self, store: ObjectStore, uri: str) -> dict[str, Any]:
        """Read the state; DamagedCheckpointError if its bytes are not those that were stored."""

        def parse(data: bytes) -> dict[str, Any]:
            if (digest := hashlib.sha256(data).hexdigest()) != self.sha256:
                raise ValueError(
                    f"{len(data)} bytes of SHA-256 {digest}, the record says {self.num_bytes} "
                    f"bytes of {self.sha256}"
                )
            state: dict[str, Any] = decode_state(data)
            return state

        return _read(store, join_uri(uri, self.key), parse)


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """CheckpointRecord makes a checkpoint of the work `fingerprint` count, once it is stored.

    `place` says how far the training of a run has come, to those who do not read the state.
    """

    fingerprint: str
    step: int
    objects: tuple[RankObject, ...]
    place: Place | None = None

    @property
    def world_size(self) -> int:
        """Count the ranks that wrote it."""
        return len(self.objects)

    @property
    def key(self) -> str:
        """Return the record's key, below the checkpoints."""
        return f"{self.step:012d}.json"

    @property
    def keys(self) -> list[str]:
        """Return the keys of all objects of the checkpoint, the record first."""
        return [self.key, *(each.key for each in self.objects)]

    def to_bytes(self) -> bytes:
        """Write JSON with its digest."""
        document = asdict(self)
        if self.place is None:
            del document["place"]
        return seal(document, indent=1)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "CheckpointRecord":
        """Invert `asdict`; TypeError or KeyError for other fields."""
        objects = tuple(typed_record(RankObject, each) for each in document["objects"])
        stated = document.get("place")
        place = None if stated is None else typed_record(Place, stated)
        return typed_record(cls, {**document, "objects": objects, "place": place})


def read_record(store: ObjectStore, uri: str) -> CheckpointRecord:
    """Read the record at `uri`; DamagedCheckpointError if it is not as it was stored."""

    def parse(data: bytes) -> CheckpointRecord:
        remedy = "the checkpoint does not count"
        return read_sealed(data, remedy, CheckpointRecord.from_document)

    return _read(store, uri, parse)


def _read(store: ObjectStore, uri: str, parse: Callable[[bytes], R]) -> R:
    try:
        return read_checked(store, uri, parse)
    except (ValueError, ObjectNotFound) as error:
        raise DamagedCheckpointError(str(error)) from error
