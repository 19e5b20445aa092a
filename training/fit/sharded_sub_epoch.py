"""One sub-epoch as the present ranks make it, from any position in it."""

from collections.abc import Generator

import torch

from training.data.cursor import DataCursor
from training.data.dataset import Dataset
from training.data.minibatch import Minibatch
from training.data.resharding import reshard
from training.data.sub_epochs import SubEpoch
from training.distributed.gather import gather_ragged
from training.distributed.process_group import ProcessGroup


def shard_sub_epoch(
    sub_epoch: SubEpoch, cursor: DataCursor, dataset: Dataset, group: ProcessGroup
) -> tuple[DataCursor, Generator[Minibatch, None, None]]:
    """The position, with every rank's number of minibatches, and what this rank has left to make.

    All ranks call this together; they count where the sub-epoch begins or is dealt again.
    """
    if cursor.done:
        plan = reshard(dataset, sub_epoch, cursor.sub_epoch, cursor.done)
    else:
        plan = dataset.plan(sub_epoch, cursor.sub_epoch)
    if not cursor.counts:
        count = torch.tensor([plan.num_minibatches()], dtype=torch.int32)
        cursor = cursor.dealt([int(each) for each in gather_ragged(count, group, "sub_epoch")])
    return cursor, plan.minibatches(cursor.num_steps)
