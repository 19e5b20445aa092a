"""Store where streams ended: means with which a later run continues them (paper 003 IV-B2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from pipeline.filterbank import NUM_BINS

_HASH, _NUMBER, _SUM = np.dtype("<u8"), np.dtype("<i8"), np.dtype("<f8")
STREAM_BYTES = _HASH.itemsize + 2 * _NUMBER.itemsize + NUM_BINS * _SUM.itemsize
"""A stream takes 536 bytes."""


@dataclass(frozen=True, slots=True)
class StreamMeans:
    """StreamMeans holds streams by rising hash of their names: frames so far, and their sum.

    `ended_us` is when a stream's last utterance was created, in microseconds since 1970.
    """

    hashes: UInt64[np.ndarray, " streams"]
    counts: Int64[np.ndarray, " streams"]
    ended_us: Int64[np.ndarray, " streams"]
    sums: Float64[np.ndarray, "streams bins"]

    @classmethod
    def latest(cls, parts: Sequence["StreamMeans"]) -> "StreamMeans":
        """Join parts; of a stream that several have, the last of them knows the most."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)])
        # The first of equal ones in reversed order is the last.
        _, places = np.unique(hashes[::-1], return_index=True)
        chosen = len(hashes) - 1 - places
        return cls(
            hashes[chosen],
            np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])[chosen],
            np.concatenate([np.empty(0, np.int64), *(part.ended_us for part in parts)])[chosen],
            np.concatenate([np.empty((0, NUM_BINS)), *(part.sums for part in parts)])[chosen],
        )

    def of(self, hashes: UInt64[np.ndarray, " wanted"]) -> "StreamMeans":
        """Return the streams of some hashes, those that are here."""
        return self._rows(np.flatnonzero(np.isin(self.hashes, hashes)))

    def between(self, edges: Sequence[int]) -> list["StreamMeans"]:
        """Cut the streams at the given places."""
        return [self._rows(np.arange(begin, end)) for begin, end in pairwise(edges)]

    def to_bytes(self) -> bytes:
        """Write the columns one after the other, little-endian."""
        columns = (
            self.hashes.astype(_HASH),
            self.counts.astype(_NUMBER),
            self.ended_us.astype(_NUMBER),
            self.sums.astype(_SUM),
        )
        return b"".join(column.tobytes() for column in columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> "StreamMeans":
        """Read what `to_bytes` wrote; ValueError if the length is of no number of streams."""
        length, rest = divmod(len(data), STREAM_BYTES)
        if rest:
            raise ValueError(
                f"{len(data)} bytes of stream means: need a multiple of {STREAM_BYTES}; run the "
                "extraction that wrote them again"
            )
        columns, offset = [], 0
        for kind, width in ((_HASH, 1), (_NUMBER, 1), (_NUMBER, 1), (_SUM, NUM_BINS)):
            columns.append(np.frombuffer(data, kind, length * width, offset))
            offset += kind.itemsize * length * width
        return cls(
            columns[0].astype(np.uint64),
            columns[1].astype(np.int64),
            columns[2].astype(np.int64),
            columns[3].astype(np.float64).reshape(length, NUM_BINS),
        )

    def _rows(self, places: Int64[np.ndarray, " chosen"]) -> "StreamMeans":
        return StreamMeans(
            self.hashes[places], self.counts[places], self.ended_us[places], self.sums[places]
        )
