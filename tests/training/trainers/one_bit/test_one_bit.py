"""1-bit SGD between real ranks, and double buffering, which is delayed SGD (004 2.2)."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.distributed import collectives
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


NUM_STEPS = 9
CURVATURE, RATE, MOMENTUM = 0.5, 2.0**-4, 0.75
COLD_STEPS = 4


def quadratic(group: ProcessGroup, num_steps: int, is_left: bool) -> Tensor:
    """Gradients c w + noise, so that a delay shows; the rate halves after five steps."""
    model = linear(bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = OneBit(
        model,
        optimizer,
        group=group,
        momentum=MOMENTUM,
        adagrad=PLAIN,
        num_unquantized_steps=COLD_STEPS,
        double_buffering=True,
    )
    with trainer:
        for step in range(num_steps):
            optimizer.param_groups[0]["lr"] = rate_of(step)
            (p,) = model.parameters()
            p.grad = CURVATURE * p.detach() + gradient(step, group.rank(), p, 0)
            optimizer.step()
        within = weights(model)
    return weights(model) if is_left else within


def rate_of(step: int) -> float:
    return RATE if step < 5 else RATE / 2


def one_bit(residual: np.ndarray) -> np.ndarray:
    """Quantize each row of (residual) to its two means, and keep the error in it."""
    upper = residual >= 0
    sent = np.zeros_like(residual)
    for row, is_upper in enumerate(upper):
        for side in (is_upper, ~is_upper):
            if side.any():
                sent[row, side] = residual[row, side].mean()
    residual -= sent
    return sent


def delayed_sgd(num_ranks: int, num_steps: int, is_left: bool) -> np.ndarray:
    """w(t + 1) = w(t) - rate(t) u(t - 1), with u(t) from gradients at w(t); leaving applies u."""
    w, velocity, second = (np.zeros((6, 8)) for _ in range(3))
    residuals, pending = [np.zeros((6, 8)) for _ in range(num_ranks)], np.zeros((6, 8))
    like = torch.empty(6, 8)
    for step in range(num_steps):
        total = np.zeros((6, 8))
        for rank in range(len(residuals)):
            g = CURVATURE * w + gradient(step, rank, like, 0).numpy()
            residuals[rank] += g * (step >= COLD_STEPS)
            total += one_bit(residuals[rank]) if step >= COLD_STEPS else g
        velocity = MOMENTUM * velocity + total
        second += velocity * (step >= COLD_STEPS)
        w = w - rate_of(step) * pending
        pending = one_bit(second) if step >= COLD_STEPS else velocity
    return w - rate_of(num_steps - 1) * pending if is_left else w


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_it_is_delayed_sgd(rank_pool: RankPool, num_ranks: int, is_left: bool) -> None:
    """Within 1e-5 of an independent reference in float64, while steps are taken and on leaving."""
    ranks = rank_pool.run(num_ranks, quadratic, NUM_STEPS, is_left)
    assert all_equal(ranks)
    expected = delayed_sgd(num_ranks, NUM_STEPS, is_left).reshape(-1)
    np.testing.assert_allclose(ranks[0].numpy(), expected, rtol=0, atol=1e-5)
    other = delayed_sgd(num_ranks, NUM_STEPS, not is_left).reshape(-1)
    assert np.abs(other - expected).max() > 1e-2


def leave_with_two_rates(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """One step of gradients of 1, whose update is under way when the ranks leave."""
    model = linear()
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    with OneBit(model, optimizer, group=group, double_buffering=True, **PLAINEST):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return model.weight.detach(), model.bias.detach()


def test_leaving_applies_the_rate_of_each_parameter_group() -> None:
    """The last update is 2 for every element of two ranks; a rate is 1 or 1/4 of it."""
    for weight, bias in simulate_ranks(2, leave_with_two_rates):
        assert weight.unique().tolist() == [-2.0]
        assert bias.unique().tolist() == [-0.5]


def train_beside_exchanges(group: ProcessGroup, is_busy: bool) -> Tensor:
    """Exchange in the training thread too, at other moments on every rank."""
    model = small_model()
    optimizer = sgd(model, 0.0)
    with OneBit(model, optimizer, group=group, double_buffering=True) as trainer:
        for step in range(35):  # more than the steps between two comparisons
            take_step(model, optimizer, step, group.rank())
            if is_busy:
                values = torch.full((1000,), float(step))
                collectives.all_reduce_sum(values, group)
                assert torch.all(values == step * group.size())
            if step % 7 == group.rank():
                trainer.statistics()
    return weights(model)


def test_other_exchanges_of_the_group_do_not_meet_its_messages(rank_pool: RankPool) -> None:
    """A loop that sums in the same group while messages are under way changes no bit."""
    busy = rank_pool.run(4, train_beside_exchanges, True)
    assert all_equal([*busy, *simulate_ranks(4, train_beside_exchanges, False)])


def seconds_of_ten_steps(group: SimulatedGroup, double_buffering: bool, step_s: float) -> float:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings: dict[str, Any] = {"adagrad": PLAIN, "double_buffering": double_buffering}
    with OneBit(model, optimizer, group=group, **settings):
        begin = group.now()
        for _ in range(10):
            group.advance(step_s)
            optimizer.step()
        return group.now() - begin


@pytest.mark.parametrize(("step_s", "hidden"), [(2.0, 1.0), (0.25, 0.25)])
def test_exchanges_are_hidden_behind_steps_in_virtual_time(step_s: float, hidden: float) -> None:
    """A step takes max(computation, exchange) with double buffering, else their sum (004 5.1)."""
    words = 64 * 64 // 32 + 2 * 64  # of which half goes to the other rank, in two stages
    link = SimulatedLink(bytes_per_s=4 * words)  # so an exchange takes a second
    alternating = max(
        simulate_ranks(
            2, partial(seconds_of_ten_steps, double_buffering=False, step_s=step_s), link=link
        )
    )
    beside = max(
        simulate_ranks(
            2, partial(seconds_of_ten_steps, double_buffering=True, step_s=step_s), link=link
        )
    )
    assert alternating == pytest.approx(10 * (step_s + 1))
    # The last exchange is still under way, and the first step waited for none.
    assert beside == pytest.approx(10 * step_s + 9 * (1 - hidden))
