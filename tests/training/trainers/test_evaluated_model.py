"""Evaluate within a training: the model that leaving would leave, and no other training."""

from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.trainers.ranks import TRAINERS, build, sgd, small_model, take_step, weights
from training.distributed import collectives
from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.trainers import AdPsgd, Trainer

NUM_RANKS, NUM_STEPS = 4, 10
EVALUATED = (1, 2, 6, NUM_STEPS - 1)
NAMES = [*TRAINERS, "ad_psgd"]
LINK = SimulatedLink(latency_s=1 / 16)
STEP_S = (64 / 64, 69 / 64, 75 / 64, 87 / 64)
"""Virtual seconds of each rank's steps: no two offers of AD-PSGD begin at one time."""


def built(group: SimulatedGroup, name: str) -> tuple[Any, Any, Trainer]:
    if name != "ad_psgd":
        return build(group, name)
    model = small_model()
    optimizer = sgd(model)
    return model, optimizer, AdPsgd(model, optimizer, group=group, mixing_seed=5)


def train(
    group: SimulatedGroup, name: str, evaluated: Collection[int], awaited: Collection[int] = ()
) -> tuple[dict[int, Tensor], Tensor, dict[str, Any]]:
    """Train, with evaluations after some of the steps; their models, the last one, and the state.

    A buffer that differs on ranks stands for running statistics.
    """
    model, optimizer, trainer = built(group, name)
    model.register_buffer("mine", torch.zeros(1))
    models = {}
    with trainer:
        model.mine.fill_(group.rank())
        for step in range(NUM_STEPS):
            group.advance(STEP_S[group.rank()])
            take_step(model, optimizer, step, group.rank())
            if step in awaited:
                trainer.state_dict()
            if step in evaluated:
                with trainer.evaluated_model():
                    models[step] = weights(model)
                    assert model.mine == 0  # as leaving, rank 0's
            if step in awaited:
                collectives.barrier(group)
        state = {
            "trainer": trainer.state_dict(),
            "statistics": trainer.statistics(),
            "optimizer": optimizer.state_dict(),
            "model": {name: each.clone() for name, each in model.state_dict().items()},
            "random": torch.get_rng_state(),
        }
    return models, weights(model), state


def assert_same(one: object, other: object, where: str = "") -> None:
    """All tensors, to the bit, and numbers of two states are the same."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert isinstance(other, dict), where
        assert one.keys() == other.keys(), where
        for name, each in one.items():
            assert_same(each, other[name], f"{where} {name}")
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where} {number}")
    else:
        assert one == other, where


@cache
def trained(
    name: str, evaluated: Collection[int]
) -> list[tuple[dict[int, Tensor], Tensor, dict[str, Any]]]:
    # AD-PSGD's exchanges depend on times, so none is under way, and all ranks wait for each other.
    awaited = EVALUATED if name == "ad_psgd" else ()
    return simulate_ranks(NUM_RANKS, train, name, evaluated, awaited, link=LINK)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_the_same_with_evaluations(name: str) -> None:
    """Weights, momenta, residuals, blocks, bytes sent and random numbers: at all ranks."""
    without, beside = trained(name, ()), trained(name, EVALUATED)
    for (_, model, state), (_, same_model, same_state) in zip(without, beside, strict=True):
        assert torch.equal(model, same_model)
        assert_same(state, same_state)


@pytest.mark.parametrize("name", NAMES)
def test_the_evaluated_model_is_what_leaving_leaves(name: str) -> None:
    """On all ranks; to the bit, but where exchanges go on, or leaving would compress."""
    for models, left, _ in trained(name, EVALUATED):
        if name == "ad_psgd":
            torch.testing.assert_close(models[NUM_STEPS - 1], left)
        elif not (name.endswith("top-k") or name == "sparse_loco"):
            assert torch.equal(models[NUM_STEPS - 1], left)


def test_a_trainer_that_is_left_holds_the_model_as_it_is() -> None:
    """Before entering and after leaving."""

    def evaluate(group: SimulatedGroup) -> None:
        model, optimizer, trainer = built(group, "bmuf")
        with trainer.evaluated_model():
            take_step(model, optimizer, 0, 0)
        before = weights(model)
        with trainer.evaluated_model():
            assert torch.equal(weights(model), before)

    simulate_ranks(1, evaluate)
