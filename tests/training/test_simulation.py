"""Training on simulated ranks: an ordinary loop, taken over by a trainer."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from training.distributed.rank_scheduler import DeadlockError
from training.simulation import Outcome, Training, simulate
from training.trainers import Bmuf, Gtc, Htm, Synchronous

NUM_STEPS, RATES = 6, (0.05, 0.02)
Minibatch = tuple[Tensor, Tensor]
TRAINERS = {
    "synchronous": Synchronous,
    "gtc": partial(Gtc, gradient_threshold=1 / 64),
    "bmuf": partial(Bmuf, block_size=4),
    "htm": partial(Htm, group_size=2, block_size=4, gradient_threshold=1 / 64),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 3))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def minibatches(epoch: int, rank: int, num_ranks: int) -> Iterator[Minibatch]:
    generator = torch.Generator().manual_seed(1000 * epoch + 10 * num_ranks + rank)
    for _ in range(NUM_STEPS):
        labels = torch.randint(3, (6,), generator=generator)
        yield torch.randn(6, 5, generator=generator) + labels.unsqueeze(1), labels


def loss(model: nn.Module, minibatch: Minibatch) -> Tensor:
    inputs, labels = minibatch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="sum") / len(labels)


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(sum(parameter.abs().sum() for parameter in model.parameters()))


TRAINING = Training(make_model, make_optimizer, minibatches, loss, evaluate, RATES)


def weights(outcome: Outcome) -> Tensor:
    return torch.cat([p.detach().flatten() for p in outcome.model.parameters()])


def plain_loop() -> tuple[nn.Module, list[float]]:
    """The same training without any trainer."""
    model = make_model()
    optimizer = make_optimizer(model)
    evaluations = []
    for epoch, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for minibatch in minibatches(epoch, 0, 1):
            optimizer.zero_grad()
            loss(model, minibatch).backward()
            optimizer.step()
        evaluations.append(evaluate(model))
    return model, evaluations


@pytest.mark.parametrize("name", ["synchronous", "bmuf"])
def test_one_rank_is_a_plain_loop(name: str) -> None:
    """One simulated rank gives the bits, and the evaluations, of a loop without a trainer."""
    simulated = simulate(TRAINING, 1, TRAINERS[name])
    model, evaluations = plain_loop()
    assert torch.equal(weights(simulated), weights(Outcome(model, ())))
    assert simulated.evaluations == tuple(evaluations)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("num_ranks", [4, 16])
def test_simulation_is_deterministic(name: str, num_ranks: int) -> None:
    """Twice the same training gives twice the same bits, dropout included."""
    first, second = (simulate(TRAINING, num_ranks, TRAINERS[name]) for _ in range(2))
    assert torch.equal(weights(first), weights(second))
    assert first.evaluations == second.evaluations
    assert len(first.evaluations) == len(RATES)


def test_ranks_with_different_numbers_of_steps_are_an_error() -> None:
    """A stream that is longer on one rank does not hang the simulation."""

    def uneven(epoch: int, rank: int, num_ranks: int) -> Iterator[Minibatch]:
        yield from list(minibatches(epoch, rank, num_ranks))[rank:]

    training = Training(make_model, make_optimizer, uneven, loss, evaluate, RATES)
    with pytest.raises((DeadlockError, RuntimeError)):
        simulate(training, 2, TRAINERS["gtc"])
