"""1-bit SGD between real ranks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.settings.trainers import AdaGrad, AdaGradPlace
from training.trainers import OneBit, Synchronous

PLAIN = AdaGrad(place=AdaGradPlace.NOWHERE)
PLAINEST: dict[str, Any] = {"momentum": 0.0, "adagrad": PLAIN}
ALWAYS = 10**6


def linear(**settings: Any) -> nn.Linear:
    """A layer of zeros, so that -weights is the sum of what SGD of rate 1 has applied."""
    model = nn.Linear(8, 6, **settings)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def gradient(step: int, rank: int, p: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def set_gradients(model: nn.Module, step: int, rank: int, factor: float = 1.0) -> Tensor:
    """Give random gradients, and return them as a vector."""
    for number, p in enumerate(model.parameters()):
        p.grad = factor * gradient(step, rank, p, number)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def conserve(group: ProcessGroup, settings: dict[str, Any]) -> dict[str, Tensor]:
    """What was applied, this rank's gradients and both its residuals; the last rank has no data."""
    model = linear(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = torch.zeros(54, dtype=torch.float64)
    with OneBit(model, optimizer, group=group, **PLAINEST, **settings) as trainer:
        for step in range(20):
            optimizer.zero_grad()
            if group.rank() < max(1, group.size() - 1):
                total += set_gradients(model, step, group.rank())
            optimizer.step()
    state = trainer.state_dict()
    residual = torch.cat([each.reshape(-1) for each in state["residuals"].values()])
    stripe = state["stripe_residual"]
    return {"applied": -weights(model), "total": total, "residual": residual, "stripe": stripe}


@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_gradient_is_lost(rank_pool: RankPool, num_ranks: int, double_buffering: bool) -> None:
    """Applied updates and both residuals of all ranks are the sum of all gradients, in float64.

    Also through the change from unquantized to quantized steps.
    """
    settings = {"num_unquantized_steps": 3, "double_buffering": double_buffering}
    ranks = rank_pool.run(num_ranks, conserve, settings)
    assert all_equal([rank["applied"] for rank in ranks])
    kept = sum(rank["residual"] for rank in ranks) + torch.cat([rank["stripe"] for rank in ranks])
    total = sum(rank["total"] for rank in ranks)
    torch.testing.assert_close(ranks[0]["applied"] + kept, total, rtol=0, atol=1e-12)
    assert bool(kept.any()) == (num_ranks > 1)


def train(group: ProcessGroup, num_unquantized_steps: int | None) -> Tensor:
    """Train by 1-bit SGD that never quantizes, or by synchronous SGD with momentum."""
    model = small_model()
    if num_unquantized_steps is None:
        optimizer, make = sgd(model), Synchronous
    else:
        optimizer = sgd(model, 0.0)
        make = partial(
            OneBit, adagrad=PLAIN, num_unquantized_steps=num_unquantized_steps, momentum=0.9
        )
    with make(model, optimizer, group=group):
        for step in range(10):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_unquantized_it_is_synchronous_sgd_with_momentum(
    rank_pool: RankPool, num_ranks: int
) -> None:
    """Bitwise on one and two ranks; gloo's ring adds those of four in another order."""
    (expected, *_), (found, *_) = (rank_pool.run(num_ranks, train, each) for each in (None, ALWAYS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if num_ranks > 2 else 0)
    (quantized, *_) = rank_pool.run(num_ranks, train, 0)
    assert torch.allclose(quantized, expected, atol=1e-6) == (num_ranks == 1)


def spend(group: SimulatedGroup) -> float:
    """The virtual seconds of five steps of 40 tensors of two shapes in turn."""
    shapes = [((4, 3), (5,))[number % 2] for number in range(40)]
    model = nn.ParameterList(torch.zeros(shape) for shape in shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OneBit(model, optimizer, group=group):
        begin = group.now()
        for _ in range(5):
            optimizer.step()
        return group.now() - begin


def test_a_stage_is_one_exchange_of_all_tensors() -> None:
    """A step takes a link's latency twice, however many tensors are trained."""
    for seconds in simulate_ranks(3, spend, link=SimulatedLink(latency_s=1.0)):
        assert seconds == pytest.approx(5 * 2)


def train_with(group: ProcessGroup, value: float, settings: dict[str, Any]) -> None:
    """Rank 1 has a gradient of `value` in the second step."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OneBit(model, optimizer, group=group, **settings):
        for step in (1, 2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
                if group.rank() == 1 and step == 2:
                    p.grad.view(-1)[0] = value
            optimizer.step()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adagrad": AdaGrad(place=AdaGradPlace.PARTIAL), "double_buffering": True},
        {"num_unquantized_steps": ALWAYS},
        {"num_unquantized_steps": ALWAYS, "double_buffering": True},
    ],
)
def test_a_gradient_that_is_not_finite_stops_all_ranks(
    rank_pool: RankPool, value: float, settings: dict[str, Any]
) -> None:
    """The error names rank and step; with double buffering a step later, here on leaving."""
    for message in rank_pool.errors(2, train_with, value, settings):
        assert "rank 1 holds a NaN or an infinity, first at step 2" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.9}, r"momentum = 0\.9 in parameter group 0, not 0: need a plain .*name ="),
        ({"weight_decay": 0.1}, r"weight_decay = 0\.1 in parameter group 0"),
        ({"dampening": 0.5}, r"dampening = 0\.5 in parameter group 0"),
        ({"momentum": 0.5, "nesterov": True}, r"momentum = 0\.5"),
        ({"maximize": True}, "maximize = True"),
    ],
)
def test_only_plain_sgd_is_wrapped(settings: dict[str, Any], message: str) -> None:
    """Each value is named with its remedy, when the trainer is made and when it changes later."""

    def make(group: ProcessGroup) -> None:
        model = small_model()
        OneBit(model, torch.optim.SGD(model.parameters(), lr=0.1, **settings), group=group)

    def change(group: ProcessGroup) -> None:
        model = small_model()
        optimizer = sgd(model, 0.0)
        with OneBit(model, optimizer, group=group):
            optimizer.param_groups[0].update(settings)
            take_step(model, optimizer, 0, group.rank())

    for scenario in (make, change):
        with pytest.raises(ValueError, match=message):
            simulate_ranks(1, scenario)


def test_other_optimizers_are_refused() -> None:
    """Adam normalizes by itself; the message says what a recipe needs."""

    def make(group: ProcessGroup) -> None:
        model = small_model()
        OneBit(model, torch.optim.Adam(model.parameters()), group=group)

    with pytest.raises(ValueError, match=r"type Adam: need .*optimizer = \{ name = .sgd., mom"):
        simulate_ranks(1, make)
