"""Say how far a training has come, by the record of its newest checkpoint; imports no torch."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infra.store.object_store import ObjectNotFound, ObjectStore
from pipeline.runs.sealed_json import read_sealed, typed_record


@dataclass(frozen=True, slots=True)
class Place:
    """Place: the sub-epoch, from 0, and the share of its minibatches that are trained on."""

    sub_epoch: int = 0
    share: float = 0.0


def newest_place(store: ObjectStore, checkpoints_uri: str) -> Place:
    """Read the place of the newest checkpoint; the beginning where none is whole and says it.

    Checkpoints of training loops of the user's own say no place.
    """
    records = [info.uri for info in store.list(checkpoints_uri) if info.uri.endswith(".json")]
    # A training at work may remove it meanwhile.
    with suppress(ObjectNotFound, ValueError):
        if records:
            return read_sealed(store.get(max(records)), "", _place_of)
    return Place()


def _place_of(record: Mapping[str, Any]) -> Place:
    return typed_record(Place, record["place"])
