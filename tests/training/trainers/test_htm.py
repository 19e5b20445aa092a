"""BMUF and the two-tier method between real ranks: the limits of HTM are BMUF and GTC, bitwise."""

import platform
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


@pytest.mark.parametrize(("hosts", "expected"), [("aabbcc", 2), ("aaabbb", 3), ("abcdef", 1)])
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


def momentum_after_a_block(group: ProcessGroup, option: str) -> Tensor:
    """The optimizer's momentum at the end of a block of three steps."""
    model = small_model()
    optimizer = sgd(model)
    with Bmuf(model, optimizer, group=group, block_size=3, optimizer_state=option):
        for step in range(3):
            take_step(model, optimizer, step, group.rank())
        momenta = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
        return torch.cat(
            [m.reshape(-1).clone() for m in momenta if m is not None] or [torch.empty(0)]
        )


def test_optimizer_momentum_at_a_blocks_end(rank_pool: RankPool) -> None:
    """Kept: each rank its own; averaged: their mean; reset: gone."""
    ranks = {
        option: rank_pool.run(2, momentum_after_a_block, option)
        for option in ("keep", "average", "reset")
    }
    assert not torch.equal(*ranks["keep"])
    assert torch.equal(*ranks["average"])
    torch.testing.assert_close(ranks["average"][0], sum(ranks["keep"]) / 2)
    assert [len(momentum) for momentum in ranks["reset"]] == [0, 0]


def train_in_parts(group: ProcessGroup, parts: list[range]) -> Tensor:
    """Leave the trainer, and enter it again, between the parts."""
    model = small_model()
    optimizer = sgd(model)
    trainer = Bmuf(model, optimizer, group=group, block_size=3)
    for part in parts:
        with trainer:
            for step in part:
                take_step(model, optimizer, step, group.rank())
    return weights(model)


def test_leaving_at_a_blocks_end_changes_nothing() -> None:
    """Left to be evaluated and entered again, training continues bitwise as if never left."""
    once, twice = (
        simulate_ranks(2, train_in_parts, parts)
        for parts in ([range(12)], [range(6), range(6, 12)])
    )
    assert all_equal([*once, *twice])


def train_on_minibatches(
    group: ProcessGroup, counts: list[int], settings: dict[str, Any]
) -> Tensor:
    """Gradients of -1 for as many steps as a rank has minibatches, and then none."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    make_trainer = Htm if "group_size" in settings else Bmuf
    with make_trainer(model, optimizer, group=group, block_size=4, **settings):
        for step in range(8):
            optimizer.zero_grad()
            if step % 4 < counts[group.rank()]:
                model.weight.grad = -torch.ones_like(model.weight)
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    "settings", [{}, {"block_momentum": 0.0}, {"group_size": 2, "gradient_threshold": 0.0}]
)
def test_a_minibatch_counts_the_same_on_any_rank(settings: dict[str, Any]) -> None:
    """Eight minibatches a block move the model as far on two ranks as on four, or on three."""
    moved = [
        simulate_ranks(4, train_on_minibatches, counts, settings)
        for counts in ([2, 2, 2, 2], [4, 4, 0, 0], [4, 3, 1, 0], [0, 4, 0, 4])
    ]
    assert all_equal([final for finals in moved for final in finals])
    assert moved[0][0] > 0


@pytest.mark.parametrize("tau", [0.0, TAU])
def test_a_nan_has_its_rank_among_all(tau: float) -> None:
    """Rank 1 of the second group of two is rank 3."""

    def scenario(group: ProcessGroup) -> str:
        model = small_model()
        optimizer = sgd(model)
        try:
            with Htm(model, optimizer, group=group, **htm(2, tau)):
                model(torch.ones(1, 5)).sum().backward()
                if group.rank() == 3:
                    model[0].weight.grad[0, 0] = torch.nan
                optimizer.step()
        except (FloatingPointError, RuntimeError) as error:
            return str(error)
        return "left"

    of_group = simulate_ranks(4, scenario)[2:]
    assert all(each.startswith("the gradient of rank 3 holds a NaN") for each in of_group), of_group
