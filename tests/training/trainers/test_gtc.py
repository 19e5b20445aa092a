"""Gradient threshold compression between real ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.trainers import Gtc, Synchronous

TAU = 4.0


def integer_gradient(step: int, rank: int, largest: int, p: nn.Parameter) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-largest, largest + 1, p.shape, generator=generator).float()


def train_on_integers(group: ProcessGroup, largest: int) -> dict[str, Any]:
    """SGD with learning rate 1 from zero weights, so that -weights is the sum of what was applied.

    The last rank never has a gradient.
    """
    model = nn.Linear(9, 6)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with Gtc(model, optimizer, group=group, gradient_threshold=TAU) as trainer:
        for step in range(7):
            optimizer.zero_grad()
            if group.rank() < max(1, group.size() - 1):
                for name, p in model.named_parameters():
                    p.grad = integer_gradient(step, group.rank(), largest, p)
                    total[name] += p.grad
            optimizer.step()
        residuals = trainer.state_dict()["residuals"]
    applied = {name: -p.detach() for name, p in model.named_parameters()}
    return {"total": total, "applied": applied, "residuals": residuals}


def train(group: ProcessGroup, gradient_threshold: float | None) -> Tensor:
    model = small_model()
    optimizer = sgd(model)
    trainer_class = (
        Synchronous
        if gradient_threshold is None
        else partial(Gtc, gradient_threshold=gradient_threshold)
    )
    with trainer_class(model, optimizer, group=group):
        for step in range(4):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


@pytest.mark.parametrize("largest", [1, 3, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_nothing_is_lost(rank_pool: RankPool, num_ranks: int, largest: int) -> None:
    """Applied + all residuals = all gradients, exactly: sparse, dense and empty messages."""
    ranks = rank_pool.run(num_ranks, train_on_integers, largest)
    for name in ("weight", "bias"):
        assert all_equal([rank["applied"][name] for rank in ranks])
        residual = sum(rank["residuals"][name] for rank in ranks)
        total = sum(rank["total"][name] for rank in ranks)
        assert torch.equal(ranks[0]["applied"][name] + residual, total)


def test_a_rank_applies_what_it_sent(rank_pool: RankPool) -> None:
    """Even alone a rank applies multiples of the threshold, never its raw gradient."""
    (rank,) = rank_pool.run(1, train_on_integers, 3)
    assert torch.all(rank["applied"]["weight"] % TAU == 0)
    assert torch.any(rank["applied"]["weight"] != 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_threshold_zero_is_unquantized(rank_pool: RankPool, num_ranks: int) -> None:
    """gradient_threshold = 0 is synchronous SGD, bitwise."""
    assert all_equal(rank_pool.run(num_ranks, train, 0.0) + rank_pool.run(num_ranks, train, None))
