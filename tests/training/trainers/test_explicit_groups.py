"""No exchange falls back to the default process group: between disjoint worlds, and without one."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, build, take_step, weights
from training.distributed.simulated_group import simulate_ranks

NAMES = ("synchronous", "gtc", "bmuf", "sparse_loco", "one_bit", "one_bit double", "htm")


def train(group: ProcessGroup, name: str, num_steps: int, first_rank: int = 0) -> Tensor:
    """Train on the data of ranks from `first_rank` on."""
    model, optimizer, trainer = build(group, name)
    with trainer:
        for step in range(num_steps):
            take_step(model, optimizer, step, first_rank + group.rank())
    return weights(model)


def train_apart(group: ProcessGroup, name: str) -> Tensor:
    """The first and the second half of the ranks train alone: other data, another length."""
    halves = [[0, 1], [2, 3]]
    parts = [dist.new_group(half) for half in halves]
    half = int(group.rank() in halves[1])
    return train(parts[half], name, 5 + 2 * half, halves[half][0])


def train_without_a_default(group: ProcessGroup, name: str) -> Tensor:
    """Train where any use of torch's default group is an error, from entering to leaving."""
    model, optimizer, trainer = build(group, name)
    default = dist.group.WORLD
    try:
        with trainer:
            dist.group.WORLD = None
            for step in range(5):
                take_step(model, optimizer, step, group.rank())
    finally:
        dist.group.WORLD = default
    return weights(model)


@pytest.mark.parametrize("name", NAMES)
def test_disjoint_worlds_do_not_meet(rank_pool: RankPool, name: str) -> None:
    """Two halves of four real ranks, of which one takes more steps, train as if alone, bitwise."""
    together = rank_pool.run(4, train_apart, name)
    alone = simulate_ranks(2, train, name, 5) + simulate_ranks(2, train, name, 7, 2)
    assert all(map(torch.equal, together, alone))
    assert not all_equal(together)


@pytest.mark.parametrize("name", NAMES)
def test_steps_need_no_default_group(rank_pool: RankPool, name: str) -> None:
    """After entering no exchange asks for torch's default group: neither tier, nor leaving."""
    without = rank_pool.run(4, train_without_a_default, name)
    assert all_equal([*without, *simulate_ranks(4, train, name, 5)])
