"""Normalize features: causal speaker means, global mean and variance (003 II-B, IV-B2).

Moments of zeroth, first and second order give the global mean and variance. The means with which
streams ended are stored, so that a later run continues them. `frame_sums.c` has the bits of the
NumPy functions, and is several times as fast.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped

from pipeline.compiled_library import compiled_library
from pipeline.filterbank import NUM_BINS

_array, _number = ctypes.c_void_p, ctypes.c_int64
FUNCTIONS = {
    "subtract_causal_means_to_half": (None, _array, _number, _array, _number, _array, _number),
    "add_moments": (None, _array, _number, _array, _array, _number),
}
_C = compiled_library("pipeline.normalization._frame_sums", FUNCTIONS)

_BLOCK_FRAMES = 250  # a quarter of a megabyte of working memory, which stays in the L2 cache


@dataclass(slots=True)
class CausalMean:
    """The running mean of one speaker's stream of log-mel energies.

    A prior of n frames of the global mean is `CausalMean(n, n * mean)`; none is the paper.
    """

    count: int = 0
    sum: Float64[np.ndarray, " bins"] = field(default_factory=lambda: np.zeros(NUM_BINS))

    def subtract(
        self, energies: Float[np.ndarray, "frames bins"], dtype: type[np.floating] = np.float32
    ) -> Float[np.ndarray, "frames bins"]:
        """Subtract from each frame the stream's mean up to and including it; advance the stream.

        Feed a speaker's utterances in order of creation; wherever the stream is cut, the
        result is the same to the bit. It is float32, rounded once more to another `dtype`.
        ValueError for another number of bins than the stream's.
        """
        if energies.shape[1:] != self.sum.shape:
            raise ValueError(f"{energies.shape[1:]} bins: need {self.sum.shape}, as the mean has")
        frames = np.ascontiguousarray(energies, np.float32)
        if _C is None or dtype != np.float16:
            return self.subtract_by_numpy(frames, dtype)
        total = self.sum.astype(np.float64)
        normalized = np.empty(energies.shape, dtype)
        _C.subtract_causal_means_to_half(
            total.ctypes.data,
            self.count,
            frames.ctypes.data,
            len(frames),
            normalized.ctypes.data,
            frames.shape[1],
        )
        self.count, self.sum = self.count + len(energies), total
        return normalized

    def subtract_by_numpy(
        self, energies: Float32[np.ndarray, "frames bins"], dtype: type[np.floating] = np.float32
    ) -> Float[np.ndarray, "frames bins"]:
        """Do what `subtract` does, to the bit, where there was no C compiler."""
        normalized = np.empty(energies.shape, dtype)
        for first in range(0, len(energies), _BLOCK_FRAMES):
            block = slice(first, first + _BLOCK_FRAMES)
            normalized[block] = self._subtract_block(energies[block])
        return normalized

    def _subtract_block(
        self, energies: Float32[np.ndarray, "frames bins"]
    ) -> Float32[np.ndarray, "frames bins"]:
        # float64: a float32 running mean is off by 0.05 after 10 M frames (28 h).
        sums = np.empty((len(energies) + 1, NUM_BINS))
        sums[0], sums[1:] = self.sum, energies
        # The same additions, two bins at a time as complex numbers: 1.4 instead of 2.6 ns each.
        pairs = sums.view(np.complex128)
        np.add.accumulate(pairs, axis=0, out=pairs)
        counts = np.arange(self.count + 1, self.count + len(sums))
        self.count, self.sum = self.count + len(energies), sums[-1].copy()
        causal_means = sums[1:]
        causal_means *= (1 / counts)[:, np.newaxis]
        normalized = np.empty_like(energies)
        np.subtract(energies, causal_means, out=normalized, casting="same_kind")
        return normalized


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Zeroth, first and second order statistics of frames; those of files add up."""

    count: int
    sum: Float64[np.ndarray, " bins"]
    sum_of_squares: Float64[np.ndarray, " bins"]

    @classmethod
    def zero(cls) -> "Moments":
        """Return the moments of no frames."""
        return cls(0, np.zeros(NUM_BINS), np.zeros(NUM_BINS))

    @classmethod
    def of(cls, frames: Float[np.ndarray, "frames bins"]) -> "Moments":
        """Accumulate the moments of finite `frames` in float64."""
        if _C is None or frames.dtype != np.float16 or frames.shape[1] != NUM_BINS:
            return cls.by_numpy(frames)
        rows, (sums, squares) = np.ascontiguousarray(frames), np.zeros((2, NUM_BINS))
        _C.add_moments(
            rows.ctypes.data, len(rows), sums.ctypes.data, squares.ctypes.data, rows.shape[1]
        )
        return cls(len(frames), sums, squares)

    @classmethod
    def by_numpy(cls, frames: Float[np.ndarray, "frames bins"]) -> "Moments":
        """Do what `of` does, to the bit, where there was no C compiler."""
        wide = frames.astype(np.float64)
        # The same additions as wide.sum(axis=0) makes, in two thirds of its time.
        sums = np.einsum("fb->b", wide)
        return cls(len(frames), sums, np.einsum("fb,fb->b", wide, wide))

    def merge(self, other: "Moments") -> "Moments":
        """Add up the moments of two sets of frames; a fixed order repeats the bits."""
        return Moments(
            self.count + other.count,
            self.sum + other.sum,
            self.sum_of_squares + other.sum_of_squares,
        )

    @property
    def mean(self) -> Float64[np.ndarray, " bins"]:
        """Mean of each bin."""
        return self.sum / self._positive_count()

    @property
    def standard_deviation(self) -> Float64[np.ndarray, " bins"]:
        """Population standard deviation of each bin; 0 for a bin that never changes."""
        variance = self.sum_of_squares / self._positive_count() - self.mean**2
        deviation: Float64[np.ndarray, " bins"] = np.sqrt(np.maximum(variance, 0))
        return deviation

    def _positive_count(self) -> int:
        if self.count < 1:
            raise ValueError(f"count = {self.count}: need at least 1 frame for a mean")
        return self.count

    def to_dict(self) -> dict[str, Any]:
        """Return numbers for JSON, which keeps every bit of a float64."""
        sums, squares = self.sum.tolist(), self.sum_of_squares.tolist()
        return {"count": self.count, "sum": sums, "sum_of_squares": squares}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Moments":
        """Read what `to_dict` wrote; ValueError if it is not the moments of any frames."""
        try:
            count = int(record["count"])
            sums = np.array(record["sum"], dtype=np.float64)
            squares = np.array(record["sum_of_squares"], dtype=np.float64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a record of moments: {error!r}") from error
        if count < 0 or sums.ndim != 1 or sums.shape != squares.shape:
            shapes = f"sums of shapes {sums.shape} and {squares.shape}"
            raise ValueError(f"count = {count}, {shapes}: need count >= 0 and two equal vectors")
        if not (np.isfinite(sums).all() and np.isfinite(squares).all() and (squares >= 0).all()):
            raise ValueError("moments must be finite, sums of squares not negative")
        return cls(count, sums, squares)


STREAM = np.dtype(
    [("hash", "<u8"), ("count", "<i8"), ("ended_us", "<i8"), ("sum", "<f8", NUM_BINS)]
)
"""The hash of a stream's name, its frames so far, and their sum: 536 bytes with 64 bins.

`ended_us` is when its last utterance was created, in microseconds since 1970.
"""
StreamMeans = Shaped[np.ndarray, " _streams"]
"""Streams by rising hash, each a STREAM."""


def latest_means(parts: Sequence[StreamMeans]) -> StreamMeans:
    """Join parts; of a stream that several have, the last of them knows the most."""
    means = np.concatenate([np.empty(0, STREAM), *parts])
    # The first of equal ones in reversed order is the last.
    _, places = np.unique(means["hash"][::-1], return_index=True)
    return means[len(means) - 1 - places]


def means_to_bytes(means: StreamMeans) -> bytes:
    """Write the columns one after the other, little-endian."""
    return b"".join(means[name].tobytes() for name in STREAM.names or ())


def means_from_bytes(data: bytes) -> StreamMeans:
    """Read what `means_to_bytes` wrote; ValueError if the length is of no number of streams."""
    length, rest = divmod(len(data), STREAM.itemsize)
    if rest:
        raise ValueError(
            f"{len(data)} bytes of stream means: need a multiple of {STREAM.itemsize}; run the "
            "extraction that wrote them again"
        )
    means, offset = np.empty(length, STREAM), 0
    for name in STREAM.names or ():
        column = means[name]
        found = np.frombuffer(data, column.dtype, column.size, offset)
        column[...] = found.reshape(column.shape)
        offset += column.nbytes
    return means
