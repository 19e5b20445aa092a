"""Exchanges between real ranks."""

import platform
import time
from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from ranks import RankPool, impatient
from torch import Tensor
from torch.distributed import ProcessGroup

from training import collectives
from training.in_process import simulate_ranks
from training.trainers.tiers import Tiers

LENGTHS = [1, 1, 40, 50, 9, 9, 70_000, 3, 0, 2]


def gather_ragged(group: ProcessGroup, lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Step by step each rank's value and how many it has, where rank 1 has `lengths`."""
    steps = []
    for length in lengths:
        mine = torch.full((group.rank() * length,), group.rank(), dtype=torch.int32)
        gathered = collectives.gather(mine, group, "test")
        assert all(len(values.unique()) <= 1 for values in gathered)
        steps.append([(int(values[:1].sum()), len(values)) for values in gathered])
    return steps


def expected_of(num_ranks: int, lengths: Sequence[int]) -> list[list[list[tuple[int, int]]]]:
    steps = [
        [(rank if length else 0, rank * length) for rank in range(num_ranks)] for length in lengths
    ]
    return [steps] * num_ranks


def name_hosts(group: ProcessGroup, name: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patched:
        if name:
            patched.setattr(platform, "node", lambda: name)
        return collectives.hosts(group, torch.device("cpu"))


def gather_nothing(group: ProcessGroup) -> int:
    gathered = collectives.gather(torch.empty(0, dtype=torch.int32), group, "test")
    return sum(map(len, gathered))


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
    collectives.add(total, group)
    collectives.average(mean, group)
    return total, mean


def arrive_alone(group: ProcessGroup) -> tuple[str, float]:
    group = impatient()
    start = time.monotonic()
    if group.rank() == 0:
        try:
            collectives.add(torch.ones(3), group)
        except collectives.CollectiveError as error:
            return str(error), time.monotonic() - start
    return "", 0.0


def meet_by_mistake(group: ProcessGroup) -> str:
    try:
        collectives.gather_text("!", group, f"purpose {group.rank()}", torch.device("cpu"))
    except collectives.CollectiveError as error:
        return str(error)
    return "no error"


def average_groups_of_two(group: ProcessGroup) -> float:
    value = torch.tensor([float(group.rank() // 2)])
    Tiers.of(group, 2, value.device).average(value)
    return float(value)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gathers_ragged_values(rank_pool: RankPool, num_ranks: int) -> None:
    """Ranks may give different numbers of values, one none; all receive all, in rank order.

    Whether the last exchange lets expect as many or not; within one process as between many.
    """
    expected = expected_of(num_ranks, LENGTHS)
    assert rank_pool.run(num_ranks, gather_ragged, LENGTHS) == expected
    assert simulate_ranks(num_ranks, gather_ragged, LENGTHS) == expected


def test_gathers_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of several hosts send their numbers alone, then what they have."""
    names = cycle("ab")
    monkeypatch.setattr(platform, "node", lambda: next(names))
    assert simulate_ranks(4, gather_ragged, LENGTHS) == expected_of(4, LENGTHS)


def test_every_rank_knows_all_hosts(rank_pool: RankPool) -> None:
    """Their names, as each host gives its own; longer ones are cut."""
    assert rank_pool.run(2, name_hosts, "") == [[platform.node()] * 2] * 2
    assert (
        simulate_ranks(2, name_hosts, 300 * "\N{LATIN SMALL LETTER U WITH DIAERESIS}")
        == [2 * [128 * "\N{LATIN SMALL LETTER U WITH DIAERESIS}"]] * 2
    )


def test_gathers_nothing(rank_pool: RankPool) -> None:
    """All ranks may have nothing to say."""
    assert rank_pool.run(2, gather_nothing) == [0, 0]


def test_broadcasts_any_type(rank_pool: RankPool) -> None:
    """Booleans, scalars, transposed and empty tensors arrive as rank 0 has them."""
    flag, scalar, matrix, empty = rank_pool.run(4, broadcast_anything)[3]
    assert flag
    assert scalar == 0
    assert torch.equal(matrix, torch.zeros(3, 2, dtype=torch.float64))
    assert len(empty) == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_and_averages(rank_pool: RankPool, num_ranks: int) -> None:
    """The sum and the mean of 1 .. N."""
    for total, mean in rank_pool.run(num_ranks, reduce):
        assert total.tolist() == [num_ranks * (num_ranks + 1) / 2] * 3
        assert mean.tolist() == [(num_ranks + 1) / 2] * 3


def test_tiers_average_over_groups(rank_pool: RankPool) -> None:
    """Leaders average; the rest of each group receives."""
    assert rank_pool.run(4, average_groups_of_two) == [0.5] * 4


def test_waits_no_longer_than_the_limit(rank_pool: RankPool) -> None:
    """A rank that the others left alone fails within its group's limit and says what to check."""
    message, waited_s = rank_pool.run(2, arrive_alone)[0]
    assert waited_s < 5
    assert "sum failed on rank 0 of 2" in message
    assert "same number of steps" in message


def test_tells_purposes_apart(rank_pool: RankPool) -> None:
    """Ranks that gather different things do not take one for the other: all are told at once."""
    for message in rank_pool.run(4, meet_by_mistake):
        assert "are at another point of training. Check" in message


def test_the_world_must_be_opened() -> None:
    """There is no world before open_world(), one rank in it without torchrun, none after."""
    with pytest.raises(RuntimeError, match=r"no process group yet: call within"):
        collectives.default_world()
    with collectives.open_world(time_limit_s=5.0) as group:
        assert collectives.default_world() is group
        assert group.size() == 1
    with pytest.raises(RuntimeError, match=r"no process group yet"):
        collectives.default_world()
