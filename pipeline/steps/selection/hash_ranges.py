"""A bucket's priorities and hashed speaker ids, in ranges that can be compared across buckets.

They are sorted and cut at the same values in every bucket. So one range of all buckets holds all
records that share an utterance id or a speaker id.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, UInt64

_HEADER = np.dtype("<u8")
_HASH = np.dtype("<u8")
_DURATION = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class HashRange:
    """HashRange holds a bucket's part of a range: utterances by rising priority, and speakers."""

    priorities: UInt64[np.ndarray, " utterances"]
    durations_ms: Int64[np.ndarray, " utterances"]
    speakers: UInt64[np.ndarray, " speakers"]

    def to_bytes(self) -> bytes:
        """Write the two counts, then 12 bytes an utterance and 8 a speaker."""
        counts = np.array([len(self.priorities), len(self.speakers)], _HEADER)
        columns = (
            self.priorities.astype(_HASH),
            self.durations_ms.astype(_DURATION),
            self.speakers.astype(_HASH),
        )
        return b"".join([counts.tobytes(), *(column.tobytes() for column in columns)])

    @classmethod
    def from_bytes(cls, data: bytes) -> "HashRange":
        """Read what `to_bytes` wrote; ValueError for another number of bytes."""
        offset = 2 * _HEADER.itemsize
        if len(data) < offset:
            raise ValueError(f"a range of hashes of {len(data)} bytes: need {offset} and more")
        num_utterances, num_speakers = map(int, np.frombuffer(data, _HEADER, 2))
        need = offset + 12 * num_utterances + _HASH.itemsize * num_speakers
        if len(data) != need:
            counts = f"{num_utterances} utterances and {num_speakers} speakers"
            raise ValueError(f"a range of {counts} in {len(data)} bytes: need {need}")
        columns = []
        for kind, length in (
            (_HASH, num_utterances),
            (_DURATION, num_utterances),
            (_HASH, num_speakers),
        ):
            columns.append(np.frombuffer(data, kind, length, offset))
            offset += kind.itemsize * length
        return cls(
            columns[0].astype(np.uint64),
            columns[1].astype(np.int64),
            columns[2].astype(np.uint64),
        )


def cut_into_ranges(
    priorities: UInt64[np.ndarray, " utterances"],
    durations_ms: Int64[np.ndarray, " utterances"],
    speakers: UInt64[np.ndarray, " speakers"],
    num_ranges: int,
) -> list[HashRange]:
    """Sort a bucket's hashes and cut them where every bucket is cut."""
    # Hashes are uniform, so ranges of equal width hold nearly equally many.
    order = np.argsort(priorities)
    priorities, durations_ms, speakers = priorities[order], durations_ms[order], np.sort(speakers)
    of_utterances, of_speakers = (
        range_edges(priorities, num_ranges),
        range_edges(speakers, num_ranges),
    )
    return [
        HashRange(
            priorities[of_utterances[each] : of_utterances[each + 1]],
            durations_ms[of_utterances[each] : of_utterances[each + 1]],
            speakers[of_speakers[each] : of_speakers[each + 1]],
        )
        for each in range(num_ranges)
    ]


def range_edges(
    hashes: UInt64[np.ndarray, " hashes"], num_ranges: int
) -> Int64[np.ndarray, " edges"]:
    """Return where each range of rising hashes begins, and where the last one ends."""
    # By the upper 32 bits: their product with a number of ranges fits into 64.
    upper, shift = hashes >> np.uint64(32), np.uint64(32)
    ranges = (upper * np.uint64(num_ranges)) >> shift
    return np.searchsorted(ranges, np.arange(num_ranges + 1, dtype=np.uint64)).astype(np.int64)


def is_among(
    hashes: UInt64[np.ndarray, " names"], risen: UInt64[np.ndarray, " others"]
) -> Bool[np.ndarray, " names"]:
    """Return for each hash whether it is in `risen`, which are sorted."""
    # A search in sorted hashes: np.isin and np.setdiff1d take many times as long for 64 bits.
    places = np.searchsorted(risen, hashes)
    is_there = np.zeros(len(hashes), bool)
    inside = places < len(risen)
    is_there[inside] = risen[places[inside]] == hashes[inside]
    return is_there
