"""Ranges of an id index: rising hashes of utterance ids, each with an object that names the id."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32, UInt64

from pipeline.steps.selection.hash_ranges import range_edges

_HASH = np.dtype("<u8")
_OBJECT = np.dtype("<u4")
ENTRY_BYTES = _HASH.itemsize + _OBJECT.itemsize
_SPREAD = 8
"""Uniform hashes lie within so many roots of their number from where they are expected."""


@runtime_checkable
class SeekableFile(Protocol):
    """SeekableFile is a file in memory, on a disk or in S3."""

    def seek(self, offset: int, /) -> int:
        """Go to a byte of the file."""
        ...

    def read(self, size: int, /) -> bytes:
        """Read so many bytes."""
        ...


@dataclass(frozen=True, slots=True)
class IdRange:
    """IdRange holds hashes by rising value, and by each the number of an object that names it."""

    hashes: UInt64[np.ndarray, " entries"]
    objects: UInt32[np.ndarray, " entries"]

    @classmethod
    def merged(cls, parts: Sequence["IdRange"]) -> "IdRange":
        """Sort the entries of all parts by hash, and those of one hash by object."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)])
        objects = np.concatenate([np.empty(0, np.uint32), *(part.objects for part in parts)])
        order = np.lexsort((objects, hashes))
        return cls(hashes[order], objects[order])

    def cut(self, num_ranges: int) -> list["IdRange"]:
        """Cut the hashes into ranges of equal width, the same ones for every index."""
        edges = range_edges(self.hashes, num_ranges)
        return [
            IdRange(self.hashes[begin:end], self.objects[begin:end])
            for begin, end in pairwise(edges)
        ]

    def to_bytes(self) -> bytes:
        """Write all hashes, then all objects: 12 bytes an entry."""
        return self.hashes.astype(_HASH).tobytes() + self.objects.astype(_OBJECT).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "IdRange":
        """Read what `to_bytes` wrote; ValueError for a part of an entry."""
        length, rest = divmod(len(data), ENTRY_BYTES)
        if rest:
            raise ValueError(f"an id index of {len(data)} bytes: need a multiple of {ENTRY_BYTES}")
        hashes = np.frombuffer(data, _HASH, length)
        objects = np.frombuffer(data, _OBJECT, length, _HASH.itemsize * length)
        return cls(hashes.astype(np.uint64), objects.astype(np.uint32))


def range_of(wanted: int, num_ranges: int) -> int:
    """Return the number of the range in which a hash lies."""
    return (wanted >> 32) * num_ranges >> 32


def find_objects(file: SeekableFile, num_bytes: int, num_ranges: int, wanted: int) -> list[int]:
    """Find the objects of a hash in the file of its range, of which a few blocks are read."""
    length = num_bytes // ENTRY_BYTES

    def hash_at(place: int) -> int:
        file.seek(_HASH.itemsize * place)
        return int.from_bytes(file.read(_HASH.itemsize), "little")

    # Uniform hashes: the place is known to within the spread, which one block of S3 holds.
    fraction = wanted * num_ranges / 2**64 - range_of(wanted, num_ranges)
    expected, spread = int(fraction * length), _SPREAD * int(length**0.5) + _SPREAD
    low, high = max(0, expected - spread), min(length, expected + spread)
    if low >= high or hash_at(low) >= wanted:
        low = 0
    if high < length and hash_at(high - 1) < wanted:
        high = length
    first = bisect_left(range(length), wanted, low, high, key=hash_at)
    last = first
    while last < length and hash_at(last) == wanted:
        last += 1
    file.seek(_HASH.itemsize * length + _OBJECT.itemsize * first)
    data = file.read(_OBJECT.itemsize * (last - first))
    return [int(each) for each in np.frombuffer(data, _OBJECT)]
