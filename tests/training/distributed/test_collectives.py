"""Run collective operations between real ranks."""

import time

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, impatient
from training.distributed import collectives, process_group
from training.trainers.block_exchange import Tiers


def broadcast_anything(group: ProcessGroup) -> list[Tensor]:
    rank = group.rank()
    values = [
        torch.tensor(rank == 0),
        torch.tensor(rank, dtype=torch.int64),
        torch.full((2, 3), float(rank), dtype=torch.float64).t(),
        torch.empty(0),
    ]
    for value in values:
        collectives.broadcast(value, group)
    return values


def reduce(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    total, mean = torch.full((3,), group.rank() + 1.0), torch.full((3,), group.rank() + 1.0)
    collectives.all_reduce_sum(total, group)
    collectives.all_reduce_mean(mean, group)
    return total, mean


def arrive_alone(group: ProcessGroup) -> tuple[str, float]:
    group = impatient()
    start = time.monotonic()
    if group.rank() == 0:
        try:
            collectives.all_reduce_sum(torch.ones(3), group)
        except process_group.CollectiveError as error:
            return str(error), time.monotonic() - start
    return "", 0.0


def average_groups_of_two(group: ProcessGroup) -> float:
    value = torch.tensor([float(group.rank() // 2)])
    Tiers.of(group, 2, value.device).average(value)
    return float(value)


def test_broadcasts_any_type(rank_pool: RankPool) -> None:
    """Booleans, scalars, transposed and empty tensors equal rank 0's on all ranks."""
    flag, scalar, matrix, empty = rank_pool.run(4, broadcast_anything)[3]
    assert flag
    assert scalar == 0
    assert torch.equal(matrix, torch.zeros(3, 2, dtype=torch.float64))
    assert len(empty) == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_and_averages(rank_pool: RankPool, num_ranks: int) -> None:
    """The sum of 1 .. N is N (N + 1) / 2 and the mean (N + 1) / 2, on every rank."""
    for total, mean in rank_pool.run(num_ranks, reduce):
        assert total.tolist() == [num_ranks * (num_ranks + 1) / 2] * 3
        assert mean.tolist() == [(num_ranks + 1) / 2] * 3


def test_tiers_average_over_groups(rank_pool: RankPool) -> None:
    """Leaders average; the other ranks of each group receive the mean."""
    assert rank_pool.run(4, average_groups_of_two) == [0.5] * 4


def test_waits_no_longer_than_the_limit(rank_pool: RankPool) -> None:
    """A rank that waits for a missing one fails within its group's limit; the message helps."""
    message, waited_s = rank_pool.run(2, arrive_alone)[0]
    assert waited_s < 5
    assert "sum failed on rank 0 of 2" in message
    assert "same number of steps" in message
