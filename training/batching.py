"""Which frames form which minibatch: 32-frame chunks, randomized, or whole utterances (003 II-B).

Pure index arithmetic on utterance lengths, so that all ranks can count their steps beforehand.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

CHUNK_FRAMES = 32
# Rows are randomized within pools of one training partition's usual two hours (003 IV-B4).
POOL_FRAMES = 240_000


@dataclass(frozen=True, slots=True)
class Piece:
    """Low-rate frames [start, stop) of one utterance of the pool."""

    utterance: int
    start: int
    stop: int


def pools(lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Cut lengths, in order, into runs [first, last) of about POOL_FRAMES frames.

    A run comes when the next one begins, so that no more lengths are read than are needed.
    """
    first, pool, start, end = 0, 0, 0, 0
    for length in lengths:
        if start // POOL_FRAMES != pool:
            yield first, end
            first, pool = end, start // POOL_FRAMES
        start += int(length)
        end += 1
    if end > first:
        yield first, end


def chunked_minibatches(
    lengths: Int64[np.ndarray, " utterances"],
    minibatch_frames: int,
    generator: np.random.Generator,
) -> list[list[Piece]]:
    """Every utterance in chunks of 32 frames, the chunks in random order (003 II-B [31])."""
    chunks = [
        Piece(utterance, start, min(start + CHUNK_FRAMES, int(length)))
        for utterance, length in enumerate(lengths)
        for start in range(0, int(length), CHUNK_FRAMES)
    ]
    order = generator.permutation(len(chunks))
    size = max(minibatch_frames // CHUNK_FRAMES, 1)
    return [
        [chunks[index] for index in order[first : first + size]]
        for first in range(0, len(chunks), size)
    ]


def whole_utterance_minibatches(
    lengths: Int64[np.ndarray, " utterances"],
    minibatch_frames: int,
    generator: np.random.Generator,
) -> list[list[Piece]]:
    """Whole utterances of like length, `minibatch_frames` with padding; minibatches shuffled."""
    by_length = np.argsort(lengths, kind="stable")
    batches: list[list[Piece]] = []
    for utterance in by_length:
        length = int(lengths[utterance])
        # Lengths ascend, so the newest is the padded length of all.
        if not batches or (len(batches[-1]) + 1) * length > minibatch_frames:
            batches.append([])
        batches[-1].append(Piece(int(utterance), 0, length))
    return [batches[index] for index in generator.permutation(len(batches))]
