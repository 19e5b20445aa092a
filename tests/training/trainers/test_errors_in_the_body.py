"""Errors within the with block that all ranks survive: afterwards the group serves other training.

An early stop or an interrupt ends a training between two steps, and the program trains again.
"""

import time
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import (
    RankPool,
    all_equal,
    impatient,
    small_model,
    take_step,
    weights,
)
from tests.training.trainers.test_trainer import TRAINERS, build, train
from training.trainers import AdPsgd, DPsgd, RandPsgd, Trainer

PAIRS = {
    "d_psgd": DPsgd,
    "rand_psgd": partial(RandPsgd, seed=5),
    "ad_psgd": partial(AdPsgd, seed=5),
}
"""Trainers whose ranks exchange with a neighbour, and may be a step apart."""


def interrupt(trainer: Trainer, group: ProcessGroup, num_steps: int) -> None:
    """Train some steps, which an error of the caller's own ends."""

    def train_in_vain() -> None:
        with trainer:
            for step in range(num_steps):
                take_step(trainer.model, trainer.optimizer, step, group.rank())
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train_in_vain()


def train_after_errors(group: ProcessGroup, name: str) -> Tensor:
    """Train after errors in two other trainers of the group."""
    for num_steps in (0, 4):
        interrupt(build(group, name)[2], group, num_steps)
    return train(group, name)


def train_again(group: ProcessGroup, name: str) -> Tensor:
    """Enter a trainer again after an error, and train on."""
    model, optimizer, trainer = build(group, name)
    interrupt(trainer, group, 4)
    with trainer:
        for step in range(4, 8):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


def slide(
    group: ProcessGroup, trainer: Trainer, num_steps: int, *, pause_s: int | float = 0
) -> Tensor:
    """Train on a loss whose slope is k + 1 on rank k, from weights of 1; return the mean model."""
    (weight,) = trainer.model.parameters()
    weight.data.fill_(1.0)
    with trainer:
        for step in range(num_steps):
            trainer.optimizer.zero_grad()
            ((group.rank() + 1) * weight.sum()).backward()
            trainer.optimizer.step()
            time.sleep(pause_s if step == 5 else 0.01)
        if num_steps < 10:
            raise ZeroDivisionError("mine")
    return weight.detach().clone()


def make_pairs(group: ProcessGroup, name: str) -> Trainer:
    model = nn.Linear(3, 1, bias=False).double()
    return PAIRS[name](model, torch.optim.SGD(model.parameters(), lr=0.01), group=group)


def slide_after_an_error(group: ProcessGroup, name: str) -> Tensor:
    """Train after an error that odd ranks have met a step later than even ones."""
    with pytest.raises(ZeroDivisionError, match="mine"):
        slide(group, make_pairs(group, name), 3 + group.rank() % 2)
    return slide(group, make_pairs(group, name), 20)


def slide_with_a_pause(group: ProcessGroup, name: str) -> Tensor:
    """Pause on all ranks for longer than the group's limit of two seconds, as to evaluate."""
    del group
    hasty = impatient()
    return slide(hasty, make_pairs(hasty, name), 10, pause_s=3)


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_training_after_an_error_has_the_same_bits(rank_pool: RankPool, name: str) -> None:
    """Messages that an error has left under way reach no later training of the same group."""
    undisturbed = rank_pool.run(4, train, name)
    assert all_equal([undisturbed[0], *rank_pool.run(4, train_after_errors, name)])


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_a_trainer_is_entered_again_after_an_error(rank_pool: RankPool, name: str) -> None:
    """Its ranks leave with one model, from which they have moved."""
    ranks = rank_pool.run(4, train_again, name)
    assert all_equal(ranks)
    assert torch.all(torch.isfinite(ranks[0]))
    assert not torch.equal(ranks[0], weights(small_model()))


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_message_of_another_training_is_not_taken(rank_pool: RankPool, name: str) -> None:
    """Ranks a step apart leave messages that none takes; 20 steps of slope 2.5 are exact."""
    for weight in rank_pool.run(4, slide_after_an_error, name):
        torch.testing.assert_close(weight, torch.full_like(weight, 1 - 20 * 0.01 * 2.5))


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_all_ranks_may_pause_for_longer_than_the_limit(rank_pool: RankPool, name: str) -> None:
    """No rank is late for an exchange, so nothing fails; 10 steps of slope 1.5 are exact."""
    for weight in rank_pool.run(2, slide_with_a_pause, name):
        torch.testing.assert_close(weight, torch.full_like(weight, 1 - 10 * 0.01 * 1.5))
