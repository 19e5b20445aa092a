"""Sharding of a sub-epoch over the present ranks, also of the rest that other ranks left."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from infra.prefetch import prefetch
from training.data.cursor import DataCursor
from training.data.dataset import Dataset, MinibatchRange, SubEpochPlan
from training.data.minibatch import Minibatch
from training.data.sub_epochs import SubEpoch
from training.distributed.gather import gather_ragged
from training.distributed.process_group import ProcessGroup

_LENGTHS_IN_FLIGHT = 8


def shard_sub_epoch(
    sub_epoch: SubEpoch,
    cursor: DataCursor,
    dataset: Dataset,
    group: ProcessGroup,
    buffers_ahead: int = 1,
) -> tuple[DataCursor, Generator[Minibatch, None, None]]:
    """Return the cursor with every rank's number of minibatches, and what this rank has left.

    All ranks call this together; they count where the sub-epoch begins or is resharded.
    """
    if cursor.done:
        plan = reshard(dataset, sub_epoch, cursor.sub_epoch, cursor.done)
    else:
        plan = dataset.plan(sub_epoch, cursor.sub_epoch)
    # Every rank must know all counts: the longest decides when the sub-epoch ends.
    if not cursor.counts:
        count = torch.tensor([plan.num_minibatches()], dtype=torch.int32)
        cursor = cursor.sharded([int(each) for each in gather_ragged(count, group, "sub_epoch")])
    return cursor, plan.minibatches(cursor.num_steps, buffers_ahead)


def reshard(
    dataset: Dataset, sub_epoch: SubEpoch, index: int, done: Sequence[Sequence[int]]
) -> SubEpochPlan:
    """Plan this rank's part of the rest of sub-epoch number `index`, each minibatch on one rank.

    `done[0]` has, rank by rank, how many minibatches the ranks that began the sub-epoch took;
    `done[1]` those of the ranks that took over, if they were interrupted too, and so on. The
    minibatches are those that the first ranks planned; a rank takes runs of them, which come from
    few shuffle buffers.
    """
    world_sizes = [*(len(counts) for counts in done), dataset.world_size]
    first_ranks = [
        replace(dataset, rank=rank, world_size=world_sizes[0]) for rank in range(world_sizes[0])
    ]
    # Where ranks share partitions, each one's lengths would be read as often as there are ranks.
    outputs = dict.fromkeys(part.output for rank in first_ranks for part in rank.slices(sub_epoch))
    read = partial(dataset.lengths, augmenter=dataset.augmenter(sub_epoch, index))
    known = dict(prefetch(read, outputs, _LENGTHS_IN_FLIGHT))
    plans = [rank.plan(sub_epoch, index, known.__getitem__) for rank in first_ranks]
    for counts, world_size in zip(done, world_sizes[1:], strict=True):
        plans = _reshard_rest(plans, counts, world_size)
    return plans[dataset.rank]


def _reshard_rest(
    plans: Sequence[SubEpochPlan], counts: Sequence[int], world_size: int
) -> list[SubEpochPlan]:
    left: list[MinibatchRange] = []
    for plan, count in zip(plans, counts, strict=True):
        left += plan.cut(count, plan.num_minibatches()).ranges
    rest = SubEpochPlan(plans[0].sub_epoch, left)
    total = rest.num_minibatches()
    # Dealt round-robin, a rank's minibatches would need a shuffle buffer of every old rank.
    edges = [total * rank // world_size for rank in range(world_size + 1)]
    return [rest.cut(first, last) for first, last in pairwise(edges)]
