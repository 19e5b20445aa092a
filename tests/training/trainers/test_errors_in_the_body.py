"""Errors within the with block that all ranks survive: afterwards the group serves other training.

An early stop or an interrupt ends a training between two steps, and the program trains again.
"""

import threading
import time
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import (
    TRAINERS,
    RankPool,
    all_equal,
    build,
    impatient,
    take_step,
    weights,
)
from tests.training.trainers.test_trainer import train
from training.checkpoints.training_state import load_whole_state, whole_state
from training.distributed import collectives
from training.distributed.simulated_group import simulate_ranks
from training.trainers import AdPsgd, DPsgd, RandPsgd, Trainer

IN_CI = ("synchronous", "bmuf", "htm", "d_psgd", "one_bit double")
EACH_EXCHANGE = [
    name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos)
    for name in sorted(TRAINERS)
]
"""One trainer of each kind of exchange; the others leave and load as these do."""

PAIRS = {
    "d_psgd": DPsgd,
    "rand_psgd": partial(RandPsgd, mixing_seed=5),
    "ad_psgd": partial(AdPsgd, mixing_seed=5),
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


@pytest.mark.parametrize("name", EACH_EXCHANGE)
def test_training_after_an_error_has_the_same_bits(rank_pool: RankPool, name: str) -> None:
    """Messages that an error has left under way reach no later training of the same group."""
    undisturbed = rank_pool.run(4, train, name)
    assert all_equal([undisturbed[0], *rank_pool.run(4, train_after_errors, name)])


def train_from_a_saved_state(group: ProcessGroup, name: str, num_lost: int) -> Tensor:
    """Train on from the state of four steps, which an error after some more has called for."""
    model, optimizer, trainer = build(group, name)
    with trainer:
        for step in range(4):
            take_step(model, optimizer, step, group.rank())
        state = deepcopy(whole_state(model, optimizer, trainer))
    load_whole_state(deepcopy(state), model, optimizer, trainer)
    if num_lost:
        interrupt(trainer, group, num_lost)
        load_whole_state(deepcopy(state), model, optimizer, trainer)
    with trainer:
        for step in range(4, 8):
            take_step(model, optimizer, step, group.rank())
        whole_state(model, optimizer, trainer)
    return weights(model)


@pytest.mark.parametrize("name", EACH_EXCHANGE)
def test_a_state_is_loaded_after_an_error(name: str) -> None:
    """The training has the bits of one that was not interrupted, whatever was under way."""
    expected = simulate_ranks(4, train_from_a_saved_state, name, 0)
    assert all_equal(expected)
    assert all_equal([expected[0], *simulate_ranks(4, train_from_a_saved_state, name, 2)])


def threads_after_an_error(group: ProcessGroup) -> tuple[int, int]:
    """Count the threads that AD-PSGD's body starts, and those that outlive its error."""
    before, started = set(threading.enumerate()), set[threading.Thread]()

    def train_in_vain() -> None:
        with make_pairs(group, "ad_psgd"):
            started.update(set(threading.enumerate()) - before)
            collectives.barrier(group)  # no rank has ended its partners' threads before
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train_in_vain()
    for thread in started:
        thread.join(10)
    return len(started), sum(thread.is_alive() for thread in started)


def test_no_thread_answers_after_an_error(rank_pool: RankPool) -> None:
    """Passive ranks have one for each neighbour; a process with one in gloo could not exit."""
    assert rank_pool.run(4, threads_after_an_error) == [(0, 0), (2, 0)] * 2


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
