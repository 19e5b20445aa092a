"""The two-tier method between real ranks: its limits are BMUF and GTC, bitwise."""

import platform
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, sgd, small_model, take_step, weights
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Bmuf, Gtc, Htm

TAU = 1 / 64


def train(
    group: ProcessGroup, name: str, settings: dict[str, Any], data_ranks: int = 1
) -> list[Tensor]:
    """The model after every step, and the one that is left."""
    model = small_model(seed=group.rank())
    optimizer = sgd(model)
    models = []
    with {"Htm": Htm, "Bmuf": Bmuf, "Gtc": Gtc}[name](model, optimizer, group=group, **settings):
        for step in range(8):
            first = group.rank() * data_ranks
            take_step(model, optimizer, step, *range(first, first + data_ranks))
            models.append(weights(model))
    return [*models, weights(model)]


def htm(group_size: int, tau: float = TAU, **settings: Any) -> dict[str, Any]:
    return {"group_size": group_size, "block_size": 3, "gradient_threshold": tau, **settings}


def all_same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(torch.stack(a), torch.stack(b)) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("settings", [{}, {"block_momentum": 0.9, "optimizer_state": "average"}])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_groups_of_one_are_bmuf(
    rank_pool: RankPool, num_ranks: int, settings: dict[str, Any]
) -> None:
    """group_size = 1 is BMUF at every step, bitwise."""
    ours = rank_pool.run(num_ranks, train, "Htm", htm(1, **settings))
    theirs = rank_pool.run(num_ranks, train, "Bmuf", {"block_size": 3, **settings})
    assert all_same(ours, theirs)


@pytest.mark.parametrize("tau", [0.0, TAU])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_group_is_gtc(rank_pool: RankPool, num_ranks: int, tau: float) -> None:
    """group_size = N is GTC at every step, bitwise, whatever the block momentum."""
    ours = rank_pool.run(num_ranks, train, "Htm", htm(num_ranks, tau, block_momentum=0.9))
    theirs = rank_pool.run(num_ranks, train, "Gtc", {"gradient_threshold": tau})
    assert all_same(ours, theirs)


def group_size(group: ProcessGroup) -> int:
    model = small_model()
    settings = {"block_size": 2, "gradient_threshold": 1.0}
    return Htm(model, sgd(model), group=group, **settings).config.group_size


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabbcc", 2), ("aaabbb", 3), ("abcdef", 1)],
)
def test_hosts_are_groups(hosts: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as each host has, where hosts follow each other."""
    names = cycle(hosts)
    monkeypatch.setattr(platform, "node", lambda: next(names))
    assert simulate_ranks(6, group_size) == [expected] * 6


@pytest.mark.parametrize("hosts", ["aaaabb", "ababab", "aabbca"])
def test_refuses_uneven_hosts(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts with different numbers of ranks, or mixed ones, are named with the remedy."""
    names = cycle(hosts)
    monkeypatch.setattr(platform, "node", lambda: next(names))
    with pytest.raises(ValueError, match=r"need equally many on each host.*or give group_size"):
        simulate_ranks(6, group_size)
