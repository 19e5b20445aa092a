"""Training on simulated ranks: an ordinary loop, taken over by a trainer."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from tests.training.distributed.stream_races import StreamRaces, races
from training import simulation
from training.distributed.simulated_group import DeadlockError, SharedGpu
from training.simulation import Outcome, Training, simulate
from training.trainers import (
    AdPsgd,
    Bmuf,
    D1dPsgd,
    DPsgd,
    Gtc,
    Htm,
    RandPsgd,
    SparseLoco,
    Synchronous,
)

pytestmark = pytest.mark.chaos

__all__ = ["races"]

NUM_STEPS, RATES = 6, (0.05, 0.02)
Minibatch = tuple[Tensor, Tensor]
TRAINERS = {
    "synchronous": Synchronous,
    "gtc": partial(Gtc, gradient_threshold=1 / 64),
    "bmuf": partial(Bmuf, block_size=4),
    "sparse_loco": partial(SparseLoco, block_size=4),
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
    assert torch.equal(weights(simulated), weights(Outcome(model, (), ())))
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


def test_ranks_that_share_a_gpu_train_as_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, races: StreamRaces
) -> None:
    """On streams of their own, which take turns at each step, BMUF's ranks end with equal bits."""
    num_ranks, on_streams = 8, Counter[str]()

    def three(epoch: int, rank: int, num_ranks: int) -> Iterator[Minibatch]:
        yield from islice(minibatches(epoch, rank, num_ranks), 3)

    def loss_on_stream(model: nn.Module, minibatch: Minibatch) -> Tensor:
        on_streams[races.current_stream(simulation.CPU).name] += 1
        return loss(model, minibatch)

    bmuf = partial(Bmuf, block_size=2)
    training = replace(TRAINING, minibatches=three, learning_rates=(0.05,))
    expected = simulate(training, num_ranks, bmuf)
    monkeypatch.setattr(simulation, "shared_device", SharedGpu)
    found = simulate(replace(training, loss=loss_on_stream), num_ranks, bmuf)
    assert torch.equal(weights(found), weights(expected))
    assert found.evaluations == expected.evaluations
    assert on_streams == {f"stream {number}": 3 for number in range(1, num_ranks + 1)}
    assert races.found == []


def test_minibatches_are_copied_ahead() -> None:
    """On a device each minibatch is there before the step before; nested tensors, nothing else."""
    made: list[int] = []

    def numbered() -> Iterator[tuple[dict[str, Tensor], int]]:
        for number in range(3):
            made.append(number)
            yield {"inputs": torch.ones(2)}, number

    seen = []
    for minibatch, number in simulation.copied_ahead(numbered(), torch.device("meta")):
        assert minibatch["inputs"].device.type == "meta"
        seen.append((number, len(made)))
    assert seen == [(0, 2), (1, 3), (2, 3)]


def test_on_a_cpu_minibatches_are_taken_as_they_are() -> None:
    """A CPU takes the minibatch itself, and none ahead of its step."""
    minibatches = [torch.ones(1), torch.ones(2)]
    source = iter(minibatches)
    taken = simulation.copied_ahead(source, simulation.CPU)
    assert next(taken) is minibatches[0]
    assert next(source) is minibatches[1]


def test_copies_to_a_gpu_are_pinned_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is not pinned would hold up the host."""
    pinned = torch.zeros(1)
    monkeypatch.setattr(Tensor, "pin_memory", lambda _: pinned)
    copies = []

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        copies.append((tensor is pinned, device.type, non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    list(simulation.copied_ahead([(torch.ones(1), torch.ones(2))], torch.device("cuda")))
    assert copies == [(True, "cuda", True)] * 2


OWN_MODELS = {
    "d_psgd": DPsgd,
    "rand_psgd": partial(RandPsgd, mixing_seed=3),
    "d1d_psgd": D1dPsgd,
    "ad_psgd": partial(AdPsgd, mixing_seed=3),
}


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_evaluated_model_is_the_mean(name: str) -> None:
    """The last evaluation is that of the model that leaving makes; buffers are a rank's own."""
    found = simulate(TRAINING, 4, OWN_MODELS[name])
    assert found.evaluations[-1] == pytest.approx(evaluate(found.model), rel=1e-6)
    assert found.evaluations[0] != found.evaluations[1]
