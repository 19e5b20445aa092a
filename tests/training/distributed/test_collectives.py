"""Run collective operations between real ranks and between simulated ones."""

import platform
import time
from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, impatient
from training.distributed import collectives, process_group
from training.distributed.collectives import gather_host_names, gather_ragged, gather_text
from training.distributed.process_group import CollectiveError
from training.distributed.simulated_group import simulate_ranks


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


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_and_averages(rank_pool: RankPool, num_ranks: int) -> None:
    """The sum of 1 .. N is N (N + 1) / 2 and the mean (N + 1) / 2, on every rank."""
    for total, mean in rank_pool.run(num_ranks, reduce):
        assert total.tolist() == [num_ranks * (num_ranks + 1) / 2] * 3
        assert mean.tolist() == [(num_ranks + 1) / 2] * 3


def test_waits_no_longer_than_the_limit(rank_pool: RankPool) -> None:
    """A rank that waits for a missing one fails within its group's limit; the message helps."""
    message, waited_s = rank_pool.run(2, arrive_alone)[0]
    assert waited_s < 5
    assert "sum failed on rank 0 of 2" in message
    assert "same number of steps" in message


LENGTHS = [1, 1, 40, 50, 9, 9, 70_000, 3, 0, 2]


def gather_steps(group: ProcessGroup, lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return each rank's value and count at every step, where rank 1 has `lengths`."""
    steps = []
    for length in lengths:
        mine = torch.full((group.rank() * length,), group.rank(), dtype=torch.int32)
        gathered = gather_ragged(mine, group, "test")
        assert all(len(values.unique()) <= 1 for values in gathered)
        steps.append([(int(values[:1].sum()), len(values)) for values in gathered])
    return steps


def expected_of(num_ranks: int, lengths: Sequence[int]) -> list[list[list[tuple[int, int]]]]:
    steps = [
        [(rank if length else 0, rank * length) for rank in range(num_ranks)] for length in lengths
    ]
    return [steps] * num_ranks


def name_hosts(group: ProcessGroup) -> list[str]:
    return gather_host_names(group, torch.device("cpu"))


def gather_for_different_purposes(group: ProcessGroup) -> str:
    try:
        gather_text("!", group, f"purpose {group.rank()}", torch.device("cpu"))
    except CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gathers_ragged_values(rank_pool: RankPool, num_ranks: int) -> None:
    """Ranks may give different numbers of values, or none; all receive all, in rank order.

    This holds whether the values travel eagerly or not, for real and for simulated ranks.
    """
    expected = expected_of(num_ranks, LENGTHS)
    assert rank_pool.run(num_ranks, gather_steps, LENGTHS) == expected
    assert simulate_ranks(num_ranks, gather_steps, LENGTHS) == expected


def test_gathers_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of several hosts first send only their numbers of values."""
    names = cycle("ab")
    monkeypatch.setattr(platform, "node", lambda: next(names))
    assert simulate_ranks(4, gather_steps, LENGTHS) == expected_of(4, LENGTHS)


def test_every_rank_knows_all_hosts(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks receive the host names of all; names beyond 256 bytes are cut."""
    assert rank_pool.run(2, name_hosts) == [[platform.node()] * 2] * 2
    monkeypatch.setattr(platform, "node", lambda: 300 * "\N{GREEK SMALL LETTER ALPHA}")
    assert simulate_ranks(2, name_hosts) == [[128 * "\N{GREEK SMALL LETTER ALPHA}"] * 2] * 2


def test_gathers_for_different_purposes_fail(rank_pool: RankPool) -> None:
    """If ranks gather for different purposes, the gather fails on all of them at once."""
    for message in rank_pool.run(4, gather_for_different_purposes):
        assert "are at another point of training. Check" in message
