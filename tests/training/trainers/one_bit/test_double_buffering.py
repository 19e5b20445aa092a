"""Double buffering: delayed SGD whose exchanges run beside the computation (004 2.2)."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.one_bit.test_one_bit import PLAIN, PLAINEST, gradient, linear
from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.distributed import collectives
from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.trainers import OneBit

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


def spend(group: SimulatedGroup, double_buffering: bool, step_s: float) -> float:
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
        simulate_ranks(2, partial(spend, double_buffering=False, step_s=step_s), link=link)
    )
    beside = max(simulate_ranks(2, partial(spend, double_buffering=True, step_s=step_s), link=link))
    assert alternating == pytest.approx(10 * (step_s + 1))
    # The last exchange is still under way, and the first step waited for none.
    assert beside == pytest.approx(10 * step_s + 9 * (1 - hidden))
