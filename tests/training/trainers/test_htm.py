"""The two-tier method between real ranks: its limits are BMUF and GTC, bitwise."""

import platform
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
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


def residuals_around_a_block(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Residuals before and after a block's end; its step has no gradients to add."""
    model = small_model()
    optimizer = sgd(model)
    trainer = Htm(model, optimizer, group=group, group_size=2, block_size=2, gradient_threshold=1e6)
    with trainer:
        take_step(model, optimizer, 0, group.rank())
        before = trainer.state_dict()["residuals"]["0.weight"]
        optimizer.zero_grad()
        optimizer.step()
        return before, trainer.state_dict()["residuals"]["0.weight"]


def refuse(group: ProcessGroup) -> str:
    model = small_model()
    try:
        Htm(
            model,
            sgd(model),
            group=group,
            group_size=3,
            block_size=2,
            block_momentum=0.5,
            gradient_threshold=TAU,
        )
    except ValueError as error:
        return str(error)
    return "no error"


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


def test_groups_share_a_model_within_a_block(rank_pool: RankPool) -> None:
    """Within a block a group has one model, and another group another; at its end all have one."""
    ranks = rank_pool.run(4, train, "Htm", htm(2))
    for step in range(8):
        models = [rank[step] for rank in ranks]
        assert torch.equal(models[0], models[1])
        assert torch.equal(models[2], models[3])
        assert torch.equal(models[0], models[2]) == ((step + 1) % 3 == 0)
    assert all_equal([rank[-1] for rank in ranks])


def test_a_group_is_one_worker_of_bmuf(rank_pool: RankPool) -> None:
    """Unquantized, two groups of two are BMUF on two ranks with both ranks' data, N := M."""
    tiers = rank_pool.run(4, train, "Htm", htm(2, tau=0.0))
    workers = rank_pool.run(2, train, "Bmuf", {"block_size": 3}, 2)
    torch.testing.assert_close(tiers[0], workers[0], rtol=1e-4, atol=1e-5)


def test_residuals_survive_a_block(rank_pool: RankPool) -> None:
    """Gradients that were not sent in one block are sent in a later one."""
    for before, after in rank_pool.run(4, residuals_around_a_block):
        assert torch.any(before != 0)
        assert torch.equal(before, after)


def test_refuses_uneven_groups(rank_pool: RankPool) -> None:
    """Groups have equal sizes."""
    for message in rank_pool.run(4, refuse):
        assert message == "group_size = 3: need a divisor of 4, the number of ranks"


def group_size(group: ProcessGroup) -> int:
    model = small_model()
    settings = {"block_size": 2, "gradient_threshold": 1.0}
    return Htm(model, sgd(model), group=group, **settings).config.group_size


def test_a_host_is_a_group(rank_pool: RankPool) -> None:
    """Ranks of one host form one group."""
    assert rank_pool.run(4, group_size) == [4] * 4


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
