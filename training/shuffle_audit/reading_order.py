"""List the rows that a trainer reads in each synchronous step, without reading a feature."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from jaxtyping import Int64

from pipeline.runs.manifest import Output
from training.data.dataset import Dataset
from training.data.sub_epochs import SubEpoch


@dataclass(frozen=True, slots=True, eq=False)
class MinibatchRows:
    """MinibatchRows locates one rank's minibatch: each segment's partition, row and first frame."""

    rank: int
    partitions: list[Output]
    rows: Int64[np.ndarray, " segments"]
    starts: Int64[np.ndarray, " segments"]


def sub_epoch_steps(
    dataset: Dataset, sub_epoch: SubEpoch, index: int
) -> Iterator[list[MinibatchRows]]:
    """Yield the ranks' minibatches in each step of sub-epoch number `index`.

    A rank that has no minibatch left is missing. Only the lengths of the taken steps are read.
    """
    ranks = (replace(dataset, rank=rank) for rank in range(dataset.world_size))
    for step in zip_longest(*(rank_steps(rank, sub_epoch, index) for rank in ranks)):
        yield [minibatch for minibatch in step if minibatch is not None]


def rank_steps(dataset: Dataset, sub_epoch: SubEpoch, index: int) -> Iterator[MinibatchRows]:
    """Yield the minibatches of one rank in one sub-epoch, in the order of training."""
    for buffer in dataset.shuffle_buffers(sub_epoch, index):
        # A buffer numbers its utterances part by part; look up each one's partition and row.
        owners = np.repeat(np.arange(len(buffer.parts)), [len(part.rows) for part in buffer.parts])
        rows = np.concatenate([part.rows for part in buffer.parts])
        for segments in buffer.batches():
            yield MinibatchRows(
                dataset.rank,
                [buffer.parts[owner].output for owner in owners[segments.utterances]],
                rows[segments.utterances],
                segments.starts,
            )
