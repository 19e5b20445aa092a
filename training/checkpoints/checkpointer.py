"""Save whole-state checkpoints: an object a rank, then a sealed record that names them all.

A checkpoint exists once its record is stored. A record whose objects are missing or changed is
damaged, and all ranks resume from the one before it.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from infra.store.object_store import (
    ObjectNotFound,
    ObjectStore,
    join_uri,
    normalize_uri,
    read_checked,
)
from pipeline.runs.commit import RecipeConflictError
from pipeline.runs.sealed_json import NamedObject, read_sealed, seal, typed_record
from training.checkpoints.training_state import reshard
from training.data.sub_epochs import Place
from training.distributed.checks import Claims, check_equal
from training.distributed.collectives import gather_text
from training.distributed.process_group import CPU, ProcessGroup
from training.tensor_encoding import decode_state, encode_state
from training.trainers.trainer import Trainer

R = TypeVar("R")

OF_A_CHECKPOINT = re.compile(r"\d{12}(\.json|-rank-\d{5}-[0-9a-f]{16}\.npz)|\.partial-[^/]+")
"""Keys that a checkpoint's writer makes, and the files that a killed writer leaves."""


class DamagedCheckpointError(ValueError):
    """DamagedCheckpointError: an object is missing, or is not what its checkpoint's record says."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """CheckpointRecord makes a checkpoint of the work `fingerprint` count, once it is stored.

    It names each rank's state, in their order, by a key below the checkpoints.
    `place` says how far the training of a run has come, to those who do not read the state.
    """

    fingerprint: str
    step: int
    objects: tuple[NamedObject, ...]
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
        objects = tuple(typed_record(NamedObject, each) for each in document["objects"])
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


class Checkpointer:
    """Checkpointer keeps the last `num_kept` checkpoints of the work `fingerprint` below `uri`.

    All ranks of `group` save and restore together; `device` is where the group's messages lie. Of
    each `num_parts` ranks in a row each has a part of the model, and shares it with every
    `num_parts`-th rank: these are compared, and resharded, among themselves.
    It lists keys only to restore, and removes only what checkpoints have written.
    """

    def __init__(
        self,
        store: ObjectStore,
        uri: str,
        fingerprint: str,
        group: ProcessGroup,
        num_kept: int = 2,
        device: torch.device = CPU,
        num_parts: int = 1,
    ) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept = {num_kept}: need at least 1 checkpoint to resume from")
        self.store = store
        self.uri = normalize_uri(uri)
        self.fingerprint = fingerprint
        self.group = group
        self.num_kept = num_kept
        self.device = device
        self.num_parts = num_parts
        self._kept: list[CheckpointRecord] = []  # the newest last; rank 0's

    def save(self, step: int, state: dict[str, Any], place: Place | None = None) -> None:
        """Store this rank's state after `step` steps; it counts once every rank's is stored.

        The record says the `place`, for those who watch the training.
        Raises ValueError, on all ranks and before anything is stored, where the states of ranks
        differ in what `whole_state()` says must be equal.
        """
        claims = self._gather(state.get("claims", Claims().to_json()))
        for part in range(self.num_parts):
            check_equal(claims[part :: self.num_parts])
        data = encode_state({name: part for name, part in state.items() if name != "claims"})
        digest = hashlib.sha256(data).hexdigest()
        # By its digest, so that other bytes never overwrite it.
        key = f"{step:012d}-rank-{self.group.rank():05d}-{digest[:16]}.npz"
        stored = NamedObject(key, len(data), digest)
        # Every rank's object precedes the record, so a kill never leaves half a checkpoint.
        self.store.put(join_uri(self.uri, key), data)
        texts = self._gather(json.dumps(asdict(stored)))
        if self.group.rank() == 0:
            objects = tuple(NamedObject(**json.loads(text)) for text in texts)
            self._keep(CheckpointRecord(self.fingerprint, step, objects, place))

    def restore(self, trainer: type[Trainer]) -> dict[str, Any] | None:
        """Return this rank's state from the newest whole checkpoint; None if there is none at all.

        The states of another number of ranks are resharded, the part of the trainer by `trainer`.
        Raises ValueError if the checkpoints belong to other work, or if all are damaged.
        """
        # Rank 0 lists for all, so that all ranks choose among the same records.
        found = self._find() if self.group.rank() == 0 else {}
        found = json.loads(self._gather(json.dumps(found))[0])
        records = [CheckpointRecord.from_document(each) for each in found["records"]]
        self._check_fingerprint(records)
        for number, record in enumerate(records):
            state = self._read(record, trainer)
            if state is not None:
                self._sweep(found["keys"], records[number:])
                return state
        if records or found["damaged"]:
            raise ValueError(
                f"{self.uri}: no checkpoint is whole: remove them to train again from the start"
            )
        self._sweep(found["keys"], [])
        return None

    def _gather(self, text: str) -> list[str]:
        return gather_text(text, self.group, "checkpoint", self.device)

    def _keep(self, record: CheckpointRecord) -> None:
        """Store the record, and only then remove what is outdated by it.

        It may replace one that this training has saved or restored. ValueError if another training
        has stored one of this step.
        """
        uri, data = join_uri(self.uri, record.key), record.to_bytes()
        if any(each.step == record.step for each in self._kept):
            self.store.put(uri, data)
        elif not self.store.put_if_absent(uri, data):
            stored = read_record(self.store, uri)
            self._check_fingerprint([stored])
            # Equal bytes are our own: the answer to the first attempt was lost.
            if stored.to_bytes() != data:
                raise ValueError(
                    f"{uri}: another training of this model has saved step {record.step}, with "
                    "other digests: end all but one; the same command resumes from the last "
                    "checkpoint"
                )
        others = [each for each in self._kept if each.step != record.step]
        before, self._kept = self._kept, [*others, record][-self.num_kept :]
        kept = {key for each in self._kept for key in each.keys}
        for key in (key for each in before for key in each.keys if key not in kept):
            self.store.delete(join_uri(self.uri, key))

    def _find(self) -> dict[str, Any]:
        """List all keys below `uri` once; return them, and the records among them, newest first."""
        infos = [*self.store.list(self.uri), *self.store.leftovers(self.uri)]
        keys = [info.uri.removeprefix(f"{self.uri}/") for info in infos]
        ours = [key for key in keys if OF_A_CHECKPOINT.fullmatch(key)]
        records, damaged = [], []
        for key in sorted((key for key in ours if key.endswith(".json")), reverse=True):
            try:
                records.append(asdict(read_record(self.store, join_uri(self.uri, key))))
            except DamagedCheckpointError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
                damaged.append(key)
        return {"records": records, "damaged": damaged, "keys": ours}

    def _check_fingerprint(self, records: list[CheckpointRecord]) -> None:
        if any(record.fingerprint != self.fingerprint for record in records):
            raise RecipeConflictError(
                f"{self.uri} belongs to another recipe or other inputs",
                "use another --run, or remove the checkpoints to train again (other versions of "
                "megahour, NumPy or torch also make another model)",
            )

    def _read(self, record: CheckpointRecord, trainer: type[Trainer]) -> dict[str, Any] | None:
        """Return this rank's state, or None on all ranks if one rank's is damaged."""
        state, problem = None, ""
        try:
            if record.world_size == self.group.size():
                state = self._state(record.objects[self.group.rank()])
            else:
                # An iterator holds one old rank's state at a time: 576 MB for the paper's student.
                rank, part = divmod(self.group.rank(), self.num_parts)
                objects = record.objects[part :: self.num_parts]
                states = map(self._state, objects)
                num_ranks = self.group.size() // self.num_parts
                state = reshard(states, len(objects), rank, num_ranks, trainer)
        except DamagedCheckpointError as error:
            problem = str(error)
        problems = [text for text in self._gather(problem) if text]
        # One rank's damage makes all ranks fall back, or their models would differ.
        if problems and self.group.rank() == 0:
            message = f"{problems[0]}: resuming from the checkpoint before it"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None if problems else state

    def _state(self, stored: NamedObject) -> dict[str, Any]:
        """Read a state; DamagedCheckpointError if its bytes are not those that were stored."""

        def parse(data: bytes) -> dict[str, Any]:
            if (digest := hashlib.sha256(data).hexdigest()) != stored.sha256:
                raise ValueError(
                    f"{len(data)} bytes of SHA-256 {digest}, the record says {stored.num_bytes} "
                    f"bytes of {stored.sha256}"
                )
            state: dict[str, Any] = decode_state(data)
            return state

        return _read(self.store, join_uri(self.uri, stored.key), parse)

    def _sweep(self, keys: list[str], records: list[CheckpointRecord]) -> None:
        """Remove what damaged checkpoints and killed writers left, and what is outdated."""
        if self.group.rank() == 0:
            self._kept = records[: self.num_kept][::-1]
            kept = {key for record in self._kept for key in record.keys}
            for key in keys:
                if key not in kept:
                    self.store.delete(join_uri(self.uri, key))
