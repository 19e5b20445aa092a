"""Batch frames: 32-frame chunks, randomized, or whole utterances (003 II-B).

These are index computations on utterance lengths, so that all ranks can count their steps
beforehand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from jaxtyping import Int64

T = TypeVar("T")

CHUNK_FRAMES = 32
# Rows are mixed within shuffle buffers of a training partition's usual two hours (003 IV-B4).
BUFFER_FRAMES = 240_000


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments of one minibatch: low-rate frames [starts, stops) of a buffer's utterances."""

    utterances: Int64[np.ndarray, " segments"]
    starts: Int64[np.ndarray, " segments"]
    stops: Int64[np.ndarray, " segments"]

    @classmethod
    def join(cls, parts: Sequence["Segments"]) -> "Segments":
        """Join the segments of all parts, in order."""
        names = (field.name for field in fields(cls))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def take(self, chosen: slice | Int64[np.ndarray, " _chosen"]) -> "Segments":
        """Return some of the segments, in the order of `chosen`."""
        return Segments(self.utterances[chosen], self.starts[chosen], self.stops[chosen])


def group_into_buffers(parts: Iterable[T], num_frames: Callable[[T], int]) -> Iterator[list[T]]:
    """Group parts, in order, into shuffle buffers of about BUFFER_FRAMES frames.

    A buffer is complete when the next one begins, so no more parts are read than are needed.
    """
    buffer: list[T] = []
    number = start = 0
    for part in parts:
        if start // BUFFER_FRAMES != number:
            yield buffer
            buffer, number = [], start // BUFFER_FRAMES
        buffer.append(part)
        start += num_frames(part)
    if buffer:
        yield buffer


def chunked_minibatches(
    lengths: Int64[np.ndarray, " utterances"],
    minibatch_frames: int,
    generator: np.random.Generator,
) -> list[Segments]:
    """Cut utterances into chunks of 32 frames, and put the chunks in random order (003 II-B)."""
    num_chunks = -(-lengths // CHUNK_FRAMES)
    utterances = np.repeat(np.arange(len(lengths)), num_chunks)
    first_chunks = np.cumsum(num_chunks) - num_chunks
    starts = (np.arange(len(utterances)) - first_chunks[utterances]) * CHUNK_FRAMES
    stops = np.minimum(starts + CHUNK_FRAMES, lengths[utterances])
    order = generator.permutation(len(utterances))
    chunks = Segments(utterances, starts, stops).take(order)
    size, _ = chunked_shape(minibatch_frames)
    return [chunks.take(slice(first, first + size)) for first in range(0, len(order), size)]


def chunked_shape(minibatch_frames: int) -> tuple[int, int]:
    """Return the chunks of a minibatch, and their frames; a buffer's last minibatch has fewer."""
    # 64 chunks are the papers' minibatch of 2,048 frames (000 3.2).
    return max(minibatch_frames // CHUNK_FRAMES, 1), CHUNK_FRAMES


def whole_utterance_minibatches(
    lengths: Int64[np.ndarray, " utterances"],
    minibatch_frames: int,
    generator: np.random.Generator,
) -> list[Segments]:
    """Group utterances of like length to `minibatch_frames` with padding; shuffle the groups."""
    # Equal lengths keep their stored order, so whole utterances mix less than chunks.
    by_length = np.argsort(lengths, kind="stable")
    batches: list[list[int]] = []
    for utterance in by_length[lengths[by_length] > 0].tolist():
        # Lengths ascend, so the newest is the padded length of all.
        if not batches or (len(batches[-1]) + 1) * lengths[utterance] > minibatch_frames:
            batches.append([])
        batches[-1].append(utterance)
    whole = Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
    order = generator.permutation(len(batches))
    return [whole.take(np.array(batches[number], np.int64)) for number in order]
