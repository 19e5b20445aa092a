"""--trainer: what each pair of trainers keeps, rescales and refuses, and what a rate is of."""

import re
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from infra.settings import ConfigurationError
from jobs.cli.job import recipe_path
from training.distributed.simulated_group import simulate_ranks
from training.settings.recipe import Recipe, read_recipe
from training.settings.trainers import (
    TRAINERS,
    AdaGrad,
    AdaGradPlace,
    AdamConfig,
    BmufConfig,
    D1dPsgdConfig,
    GtcConfig,
    HtmConfig,
    OneBitConfig,
    OptimizerConfig,
    SgdConfig,
    SparseLocoConfig,
    TrainerConfig,
)
from training.trainers.trainer import make_trainer

TINY = Path(__file__).parents[1] / "whole_path" / "tiny.toml"
NOWHERE = AdaGrad(place=AdaGradPlace.NOWHERE)
CONFIGS: list[TrainerConfig] = [
    GtcConfig(gradient_threshold=1.0),
    HtmConfig(gradient_threshold=1.0, group_size=2, momentum_constant=2.0, block_size=1),
    HtmConfig(gradient_threshold=1.0, group_size=2, block_momentum=0.5, block_size=1),
    BmufConfig(block_learning_rate=0.5, block_momentum=0.75, block_size=1),
    BmufConfig(block_momentum=0.5, block_size=1, form="as_printed"),
    BmufConfig(block_size=1, form="as_printed"),
    SparseLocoConfig(density=1.0, bits=8, error_decay=1.0, outer_learning_rate=0.7, block_size=1),
    OneBitConfig(momentum=0.5),
    OneBitConfig(momentum=0.5, adagrad=AdaGrad(place=AdaGradPlace.PARTIAL)),
    OneBitConfig(momentum=0.5, adagrad=AdaGrad(place=AdaGradPlace.SMOOTHED, decay=0.5)),
    D1dPsgdConfig(),
]
NUM_RANKS, RATE = 4, 0.5


def moved(group: ProcessGroup, config: TrainerConfig) -> float:
    """How far gradients of 1 on each rank move two weights in 12 steps, after 20 others."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer, places = make_trainer(config, model, optimizer, group), []
    for num_steps in (20, 12):
        with trainer:
            for _ in range(num_steps):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
                group.pass_turn()  # type: ignore[attr-defined]
        places.append(float(model.weight.detach().mean()))
    return places[0] - places[1]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_rate_moves_a_model_as_its_unit_says(config: TrainerConfig) -> None:
    """In the long run, on four ranks, in two groups where there are groups."""
    found, *_ = simulate_ranks(NUM_RANKS, moved, config)
    unit = config.rate_unit
    shares = {"mean over ranks": 1, "mean over groups": 2, "normalized": 1}
    if isinstance(config, BmufConfig):  # of eq. (5), which only the number of models gives
        shares["sum as printed"] = NUM_RANKS * (1 + config.block_momentum_of(NUM_RANKS))
    expected = 12 * RATE * unit.factor * shares.get(unit.over, NUM_RANKS)
    assert found == pytest.approx(expected, rel=0.02)


def text(name: str, optimizer: str) -> str:
    """The tiny recipe with a trainer's defaults, but for the settings that are of it alone."""
    found = re.sub(r"\[student\.trainer\].*?\n\n", "", TINY.read_text(), flags=re.DOTALL)
    own = {"block_size": 7, "gradient_threshold": 3.0, "mixing_seed": 5}
    record = TRAINERS[name]()
    lines = [f"{key} = {value}" for key, value in own.items() if hasattr(record, key)]
    optimizer = '{ name = "sgd", momentum = 0 }' if name == "one_bit" else optimizer
    lines = ["[student.trainer]", f'name = "{name}"', *lines]
    return "\n".join([found.replace("[student]", f"[student]\noptimizer = {optimizer}"), *lines])


class Written:
    """A recipe that is no file."""

    def __init__(self, contents: str) -> None:
        self.contents = contents

    def read_bytes(self) -> bytes:
        return self.contents.encode()


def replaced(before: str, after: str, optimizer: str, *overrides: str) -> tuple[Recipe, str]:
    said: list[str] = []
    recipe = Written(text(before, optimizer))
    return read_recipe(recipe, overrides, {"student": after}, said.append), " ".join(said)


SGD, ADAM = '{ name = "sgd", momentum = 0.8 }', '{ name = "adam" }'


def units(trainer: TrainerConfig, optimizer: OptimizerConfig) -> tuple[float, str]:
    unit = trainer.rate_unit
    is_adam = isinstance(optimizer, AdamConfig)
    return (1.0, "normalized") if is_adam else (unit.factor, unit.over)


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        *((before, after, SGD) for before, after in permutations(TRAINERS, 2)),
        # By Adam every unit is normalized but 1-bit SGD's.
        *((before, after, ADAM) for before, after in pairwise([*TRAINERS, next(iter(TRAINERS))])),
    ],
)
def test_each_pair_of_trainers(before: str, after: str, optimizer: str) -> None:
    """Blocks and thresholds are the new one's; a frame moves the model as before, or is refused."""
    old = read_recipe(Written(text(before, optimizer))).student
    rates = ["student.initial_learning_rate=0.25", "student.final_learning_rate=0.125"]
    given, said = replaced(before, after, optimizer, *rates)
    assert (given.student.initial_learning_rate, given.student.final_learning_rate) == (0.25, 0.125)
    assert "student.initial_learning_rate" not in said
    new, own = given.student.trainer, TRAINERS[after]()
    assert new.name == after
    for key in ("block_size", "block_momentum"):
        assert getattr(new, key, None) == getattr(own, key, None)
    if isinstance(new, GtcConfig | HtmConfig):  # for 256 frames, an eighth of the papers'
        assert isinstance(own, GtcConfig | HtmConfig)
        assert new.gradient_threshold == own.gradient_threshold / 8
        assert f"student.trainer.gradient_threshold = {new.gradient_threshold}" in said or (
            f"student.trainer.gradient_threshold 3.0 -> {new.gradient_threshold}" in said
        )
    if hasattr(old.trainer, "mixing_seed") and hasattr(new, "mixing_seed"):
        assert new.mixing_seed == 5
    (old_factor, old_over), (new_factor, new_over) = (
        units(old.trainer, old.optimizer),
        units(new, given.student.optimizer),
    )
    if old_over == new_over:
        found, said = replaced(before, after, optimizer)
        ratio = old_factor / new_factor
        expected = ratio * old.initial_learning_rate
        assert found.student.initial_learning_rate == pytest.approx(expected)
        assert ("initial_learning_rate 0.01 ->" in said) == (ratio != 1)
    else:
        message = "need --set student.initial_learning_rate=.* and --set student.final_learning"
        with pytest.raises(ConfigurationError, match=message):
            replaced(before, after, optimizer)


def test_momentum_goes_where_the_new_trainer_has_it() -> None:
    """1-bit SGD smooths itself, by the same equation; AdaGrad's part is Adam's."""
    nowhere = "student.trainer.adagrad.place=nowhere"
    to_one_bit, _ = replaced("gtc", "one_bit", SGD, nowhere)
    assert to_one_bit.student.trainer == OneBitConfig(momentum=0.8, adagrad=NOWHERE)
    assert to_one_bit.student.optimizer == SgdConfig(momentum=0.0)
    assert to_one_bit.student.initial_learning_rate == 0.01
    back, said = replaced("one_bit", "gtc", SGD)
    assert back.student.optimizer == AdamConfig()
    assert "student.initial_learning_rate 0.01 -> 0.1" in said


def papers(name: str, *overrides: str) -> tuple[Recipe, str]:
    said: list[str] = []
    found = read_recipe(recipe_path("hours_1m"), overrides, {"student": name}, said.append)
    return found, " ".join(said)


def test_the_papers_student_by_other_trainers() -> None:
    """BMUF's block of 100 is not HTM's; a mean over ranks needs rates, which are named."""
    recipe, said = papers("htm")
    assert recipe.student.trainer == HtmConfig(block_size=50, gradient_threshold=2.0)
    assert recipe.student.initial_learning_rate == 1.5e-6
    assert said == (
        "--trainer htm: student.trainer.block_size 100 -> 50, student.trainer.gradient_threshold = "
        "2.0; --set gives others"
    )
    with pytest.raises(ConfigurationError, match=r"_rate=\(1.5e-06 x N on N ranks"):
        papers("d1d_psgd")
    with pytest.raises(ConfigurationError, match="which keeps them"):
        papers("one_bit")
    assert papers("bmuf") == (read_recipe(recipe_path("hours_1m")), "")


def test_set_has_the_last_word() -> None:
    """Its settings are the new trainer's: one that it does not have is refused, in its name."""
    block: Any = papers("htm", "student.trainer.block_size=100")[0].student.trainer
    assert block.block_size == 100
    halved, _ = papers("bmuf", "student.trainer.momentum_constant=2")
    assert halved.student.initial_learning_rate == 1.5e-6  # the same trainer: nothing is replaced
    doubled, said = papers("htm", "student.trainer.momentum_constant=2")
    assert doubled.student.initial_learning_rate == 0.75e-6
    assert "student.initial_learning_rate 1.5e-06 -> 7.5e-07" in said
    with pytest.raises(ConfigurationError, match="gtc: --set names 'htm' in student"):
        papers("gtc", "student.trainer={name='htm'}")
    with pytest.raises(ConfigurationError, match="unknown key block_size: known: name, gradient"):
        papers("gtc", "student.trainer.block_size=7")
