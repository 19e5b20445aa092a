"""No exchange falls back to the default process group: between disjoint worlds, and without one."""

from collections.abc import Callable
from functools import partial

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks
from training.trainers import Bmuf, Gtc, Htm, OneBit, SparseLoco, Synchronous, Trainer

TAU = 1 / 64
TRAINERS: dict[str, Callable[..., Trainer]] = {
    "synchronous": Synchronous,
    "gtc": partial(Gtc, gradient_threshold=TAU),
    "bmuf": partial(Bmuf, block_size=3),
    "sparse_loco": partial(SparseLoco, block_size=3),
    "one_bit": OneBit,
    "one_bit_double": partial(OneBit, double_buffering=True),
    "htm": partial(Htm, group_size=2, block_size=3, gradient_threshold=TAU),
}


def train(
    group: ProcessGroup, make_trainer: Callable[..., Trainer], num_steps: int, first_rank: int = 0
) -> Tensor:
    """Train on the data of ranks from `first_rank` on."""
    model = small_model()
    optimizer = sgd(model, 0.0)  # 1-bit SGD has the momentum itself
    with make_trainer(model, optimizer, group=group):
        for step in range(num_steps):
            take_step(model, optimizer, step, first_rank + group.rank())
    return weights(model)


def train_apart(group: ProcessGroup, make_trainer: Callable[..., Trainer]) -> Tensor:
    """The first and the second half of the ranks train alone: other data, another length."""
    ranks = list(range(group.size()))
    halves = [ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]]
    parts = [
        group.subgroup(half) if isinstance(group, SimulatedGroup) else dist.new_group(half)
        for half in halves
    ]
    half = int(group.rank() in halves[1])
    return train(parts[half], make_trainer, 5 + 2 * half, halves[half][0])


def train_without_a_default(group: ProcessGroup, make_trainer: Callable[..., Trainer]) -> Tensor:
    """Train where any use of torch's default group is an error, from entering to leaving."""
    model = small_model()
    optimizer = sgd(model, 0.0)  # 1-bit SGD has the momentum itself
    default = dist.group.WORLD
    try:
        with make_trainer(model, optimizer, group=group):
            dist.group.WORLD = None
            for step in range(5):
                take_step(model, optimizer, step, group.rank())
    finally:
        dist.group.WORLD = default
    return weights(model)


def alone(num_ranks: int, make_trainer: Callable[..., Trainer]) -> list[Tensor]:
    """Train each half of `num_ranks` where there are no other ranks."""
    half = num_ranks // 2
    first = simulate_ranks(half, train, make_trainer, 5)
    return first + simulate_ranks(half, train, make_trainer, 7, half)


@pytest.mark.parametrize("name", TRAINERS)
def test_disjoint_worlds_do_not_meet(rank_pool: RankPool, name: str) -> None:
    """Two halves of four real ranks, of which one takes more steps, train as if alone, bitwise."""
    together = rank_pool.run(4, train_apart, TRAINERS[name])
    pairs = zip(together, alone(4, TRAINERS[name]), strict=True)
    assert all(all_equal(list(pair)) for pair in pairs)
    assert not all_equal(together)


@pytest.mark.parametrize("name", TRAINERS)
def test_steps_need_no_default_group(rank_pool: RankPool, name: str) -> None:
    """After entering no exchange asks for torch's default group: neither tier, nor leaving."""
    without = rank_pool.run(4, train_without_a_default, TRAINERS[name])
    assert all_equal([*without, *simulate_ranks(4, train, TRAINERS[name], 5)])
