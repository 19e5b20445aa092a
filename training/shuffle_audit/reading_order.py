"""What a trainer really reads: the rows of each synchronous step, without reading a feature."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from jaxtyping import Int64

from pipeline.runs.manifest import Output
from training.data.dataset import Dataset
from training.data.sub_epochs import SubEpoch


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One rank's minibatch: of each piece the partition, the row in it and the first frame."""

    rank: int
    partitions: list[Output]
    rows: Int64[np.ndarray, " pieces"]
    starts: Int64[np.ndarray, " pieces"]


def sub_epoch_steps(dataset: Dataset, sub_epoch: SubEpoch, index: int) -> Iterator[list[Reading]]:
    """Step by step what the ranks read in sub-epoch number `index`; those out of data read nothing.

    Only as many lengths are read as the steps taken need.
    """
    ranks = (replace(dataset, rank=rank) for rank in range(dataset.world_size))
    for readings in zip_longest(*(rank_steps(rank, sub_epoch, index) for rank in ranks)):
        yield [reading for reading in readings if reading is not None]


def rank_steps(dataset: Dataset, sub_epoch: SubEpoch, index: int) -> Iterator[Reading]:
    """The minibatches of one rank in one sub-epoch, in its order."""
    for buffer in dataset.shuffle_buffers(sub_epoch, index):
        owners = np.repeat(np.arange(len(buffer.parts)), [len(part.rows) for part in buffer.parts])
        rows = np.concatenate([part.rows for part in buffer.parts])
        for segments in buffer.batches():
            yield Reading(
                dataset.rank,
                [buffer.parts[owner].output for owner in owners[segments.utterances]],
                rows[segments.utterances],
                segments.starts,
            )
