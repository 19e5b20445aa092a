"""Blockwise model-update filtering between real ranks, against a simulation in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Bmuf, Htm

BLOCK_SIZE = 3


def train(group: ProcessGroup, num_steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    model = small_model(seed=group.rank())
    optimizer = sgd(model)
    within, momenta = [], []
    trainer = Bmuf(model, optimizer, group=group, block_size=BLOCK_SIZE, **settings)
    with trainer:
        for step in range(num_steps):
            take_step(model, optimizer, step, group.rank())
            within.append(weights(model))
            momenta.append(momentum_of(model, optimizer))
    return {"within": within, "momenta": momenta, "final": weights(model)}


def momentum_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    momenta = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
    return torch.cat([m.reshape(-1).clone() for m in momenta if m is not None] or [torch.empty(0)])


def test_optimizer_momentum_at_a_blocks_end(rank_pool: RankPool) -> None:
    """Kept: each rank its own; averaged: their mean; reset: gone."""
    ranks = {
        option: [
            rank["momenta"][BLOCK_SIZE - 1]
            for rank in rank_pool.run(2, train, BLOCK_SIZE, {"optimizer_state": option})
        ]
        for option in ("keep", "average", "reset")
    }
    assert not torch.equal(*ranks["keep"])
    assert torch.equal(*ranks["average"])
    torch.testing.assert_close(ranks["average"][0], sum(ranks["keep"]) / 2)
    assert [len(momentum) for momentum in ranks["reset"]] == [0, 0]


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
