"""List the rows that a trainer reads in each synchronous step, without reading a feature."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from jaxtyping import Int64

from pipeline.runs.manifest import Output
from training.data.row_order import RowOrder
from training.data.sub_epochs import SubEpoch


@dataclass(frozen=True, slots=True, eq=False)
class MinibatchRows:
    """MinibatchRows locates one rank's minibatch: each segment's partition, row and first frame."""

    rank: int
    partitions: list[Output]
    rows: Int64[np.ndarray, " segments"]
    starts: Int64[np.ndarray, " segments"]


def sub_epoch_steps(
    order: RowOrder, sub_epoch: SubEpoch, index: int
) -> Iterator[list[MinibatchRows]]:
    """Yield the ranks' minibatches in each step of sub-epoch number `index`.

    A rank that has no minibatch left is missing. Only the lengths of the taken steps are read.
    """
    ranks = (replace(order, rank=rank) for rank in range(order.world_size))
    for step in zip_longest(*(rank_steps(rank, sub_epoch, index) for rank in ranks)):
        yield [minibatch for minibatch in step if minibatch is not None]


def rank_steps(order: RowOrder, sub_epoch: SubEpoch, index: int) -> Iterator[MinibatchRows]:
    """Yield the minibatches of one rank in one sub-epoch, in the order of training."""
    for buffer in order.shuffle_buffers(sub_epoch, index):
        # A buffer numbers its utterances part by part; look up each one's partition and row.
        owners = np.repeat(np.arange(len(buffer.parts)), [len(part.rows) for part in buffer.parts])
        rows = np.concatenate([part.rows for part in buffer.parts])
        for segments in buffer.batches():
            yield MinibatchRows(
                order.rank,
                [buffer.parts[owner].output for owner in owners[segments.utterances]],
                rows[segments.utterances],
                segments.starts,
            )
