"""Compare HTM's limits: groups of one rank are BMUF and one group is GTC, bit for bit."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Bmuf, Gtc, Htm, Trainer

NUM_RANKS = 8
TAU = 1 / 8
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def train(
    group: ProcessGroup, make_trainer: Callable[..., Trainer], optimizer_name: str
) -> list[Tensor]:
    """Return the model after every step, and the final model."""
    torch.manual_seed(group.rank())
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    models = []
    with make_trainer(model, optimizer, group=group):
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.randn(6, 5)).square().sum().backward()
            optimizer.step()
            models.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return [*models, nn.utils.parameters_to_vector(model.parameters()).detach()]


def same(one: Callable[..., Trainer], other: Callable[..., Trainer], optimizer_name: str) -> bool:
    runs = (simulate_ranks(NUM_RANKS, train, make, optimizer_name) for make in (one, other))
    first, second = (torch.stack([torch.stack(models) for models in run]) for run in runs)
    return torch.equal(first, second)


@pytest.mark.parametrize("optimizer_name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("form", ["nesterov", "as_printed"])
def test_groups_of_one_are_bmuf(form: str, optimizer_name: str) -> None:
    """With groups of one rank, every rank's model equals BMUF's after every step."""
    bmuf = partial(Bmuf, block_size=3, form=form, optimizer_state="average")
    htm = partial(
        Htm,
        group_size=1,
        gradient_threshold=TAU,
        block_size=3,
        form=form,
        optimizer_state="average",
    )
    assert same(htm, bmuf, optimizer_name)


@pytest.mark.parametrize("optimizer_name", sorted(OPTIMIZERS))
def test_one_group_is_gtc(optimizer_name: str) -> None:
    """With one group, every model equals GTC's for any block settings: no block is filtered."""
    htm = partial(
        Htm,
        group_size=NUM_RANKS,
        gradient_threshold=TAU,
        block_size=3,
        block_momentum=0.9,
        block_learning_rate=0.7,
    )
    assert same(htm, partial(Gtc, gradient_threshold=TAU), optimizer_name)
    assert not same(htm, partial(Gtc, gradient_threshold=2 * TAU), optimizer_name)
