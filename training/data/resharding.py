"""Resharding: the rest of a sub-epoch that other ranks began, over the present ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from infra.prefetch import prefetch
from training.data.dataset import Dataset, MinibatchRange, SubEpochPlan
from training.data.sub_epochs import SubEpoch

_LENGTHS_IN_FLIGHT = 8


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
