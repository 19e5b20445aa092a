"""Extents: one stored object for many readers, each of which reads its own bytes by range GETs.

A table of entries comes first, then the extents' bytes in order. An entry has 56 bytes:

    4   number of extents in the object, little-endian as all numbers
    4   number of this extent, from 0
    8   where its bytes begin in the object
    8   where they end
    32  SHA-256 of the 24 bytes before, followed by the extent's bytes

Each entry is protected by itself: of 10,000 readers each reads one, and not a table of 560 kB.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from infra.store.checked_reads import until_whole
from infra.store.object_store import ObjectStore

MAX_EXTENTS = 1_000_000
"""Their table takes 56 MB."""

_PLACE = Struct("<IIQQ")
ENTRY_BYTES = _PLACE.size + hashlib.sha256().digest_size


def join_extents(extents: Sequence[bytes]) -> bytes:
    """Write extents as one object; ValueError for none, and for more than a million."""
    count = len(extents)
    if not 1 <= count <= MAX_EXTENTS:
        raise ValueError(
            f"{count} extents in an object: need 1..{MAX_EXTENTS}: put metadata into fewer buckets"
        )
    table, end = [], ENTRY_BYTES * count
    for number, data in enumerate(extents):
        begin, end = end, end + len(data)
        place = _PLACE.pack(count, number, begin, end)
        table.append(place + _digest(place, data))
    return b"".join((*table, *extents))


def num_gets(num_extents: int) -> int:
    """Count the GETs that read an extent which is not empty: its entry, then its bytes."""
    return 1 if num_extents == 1 else 2


@dataclass(frozen=True, slots=True)
class ExtentPlace:
    """ExtentPlace is an extent's number, of how many, in an object of known size."""

    uri: str
    object_bytes: int
    number: int
    num_extents: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.num_extents <= MAX_EXTENTS:
            raise ValueError(
                f"{self.uri}: extent {self.number} of {self.num_extents}: need a number from 0, "
                f"of at most {MAX_EXTENTS}"
            )

    def read(self, store: ObjectStore) -> bytes:
        """Read the extent; ValueError with the URI if the bytes are damaged at rest."""
        return until_whole(self.uri, lambda: self._read_once(store))

    def _read_once(self, store: ObjectStore) -> bytes:
        # A lone extent is the whole object, and needs no second request.
        is_lone = self.num_extents == 1
        first_bytes = self.object_bytes if is_lone else ENTRY_BYTES
        found = self._fetch(store, ENTRY_BYTES * self.number, first_bytes)
        entry, data = found[:ENTRY_BYTES], found[ENTRY_BYTES:]
        begin, end = self._parse(entry[: _PLACE.size])
        if end > begin and not is_lone:
            data = self._fetch(store, begin, end - begin)
        if _digest(entry[: _PLACE.size], data) != entry[_PLACE.size :]:
            raise self._damage("SHA-256 is not that of its entry")
        return data

    def _fetch(self, store: ObjectStore, start: int, num_bytes: int) -> bytes:
        found = store.fetch_range(self.uri, start, num_bytes)
        if (found.object_bytes, len(found.data)) != (self.object_bytes, num_bytes):
            raise self._damage(
                f"{len(found.data)} bytes of {num_bytes} in an object of {found.object_bytes}, "
                f"which had {self.object_bytes}"
            )
        return found.data

    def _parse(self, place: bytes) -> tuple[int, int]:
        count, number, begin, end = _PLACE.unpack(place)
        first = ENTRY_BYTES * self.num_extents
        if (count, number) != (self.num_extents, self.number):
            raise self._damage(f"the entry is of extent {number} of {count}")
        if not first <= begin <= end <= self.object_bytes:
            raise self._damage(
                f"bytes {begin} to {end}: need places from {first} to {self.object_bytes}"
            )
        return begin, end

    def _damage(self, said: str) -> ValueError:
        return ValueError(
            f"extent {self.number} of {self.num_extents}: {said}: the object was altered or "
            "damaged; remove the folder scratch above it, and run the step again"
        )


def _digest(place: bytes, data: bytes) -> bytes:
    digest = hashlib.sha256(place)
    digest.update(data)
    return digest.digest()
