"""Minibatch-size selection: the largest size that does not hurt, alone and within a fit."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from infra.settings import ConfigurationError
from tests.training.fit.small_fits import copy_stopped, fit, small_fit, steps_saved, write_run
from tests.whole_path.processes import TINY
from training.checkpoints.training_state import whole_state
from training.distributed.simulated_group import simulate_ranks
from training.fit.minibatch_selection import (
    MinibatchSelection,
    frame_accuracy,
    largest_harmless,
    select_minibatch,
)
from training.fit.model_specs import Fit, baseline_fit, sequence_fit, student_fit
from training.settings.model_training import LOW_RATE_FRAME_S, MinibatchSelectionConfig
from training.settings.recipe import CheckpointConfig, read_recipe
from training.settings.trainers import AdaGrad, AdaGradPlace, OneBitConfig
from training.trainers import (
    AdPsgd,
    Bmuf,
    D1dPsgd,
    DPsgd,
    Gtc,
    Htm,
    OneBit,
    RandPsgd,
    Synchronous,
    Trainer,
)

pytestmark = pytest.mark.chaos

SIZES = (8, 16, 32, 64)
NUM_CLASSES, NUM_INPUTS, NUM_FRAMES = 3, 6, 512


@pytest.mark.parametrize(
    ("accuracies", "chosen"),
    [
        ({8: 50.0, 16: 49.6, 32: 49.4}, 16),
        ({8: 50.0, 16: 49.4, 32: 52.0}, 8),
        ({8: 50.0, 16: 52.0, 32: 51.6}, 32),
        ({8: 50.0, 16: math.nan, 32: 60.0}, 8),
        ({8: math.nan, 16: 1.0}, 8),
    ],
)
def test_the_largest_that_does_not_hurt(accuracies: dict[int, float], chosen: int) -> None:
    """Half a point below the best of the smaller ones is equal; .6 and a divergence hurt."""
    assert largest_harmless(accuracies) == chosen


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(NUM_CLASSES, (NUM_FRAMES,), generator=generator)
    centres = 0.6 * torch.randn(NUM_CLASSES, NUM_INPUTS, generator=generator)
    return centres[labels] + torch.randn(NUM_FRAMES, NUM_INPUTS, generator=generator), labels


def train_at(
    group: ProcessGroup, parts: tuple[nn.Module, Any, Trainer], rate: float, size: int
) -> float:
    """Pass over the data once, in minibatches of `size` frames of all ranks."""
    model, optimizer, trainer = parts
    inputs, labels = data()
    own = torch.arange(NUM_FRAMES).view(-1, size // group.size())[group.rank() :: group.size()]
    num_correct = 0
    for settings in optimizer.param_groups:
        settings["lr"] = rate
    with trainer:
        for numbers in own:
            optimizer.zero_grad()
            logits = model(inputs[numbers])
            # A sum over frames: larger minibatches take longer steps, until that hurts.
            nn.functional.cross_entropy(logits, labels[numbers], reduction="sum").backward()
            optimizer.step()
            num_correct += int((logits.argmax(1) == labels[numbers]).sum())
    return frame_accuracy(num_correct, own.numel(), group)


def select(
    group: ProcessGroup, make_trainer: Any, rate: float
) -> tuple[MinibatchSelection, list[Tensor], float, float]:
    """Train once, select, then train at the chosen size and again from the start."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(NUM_INPUTS, 8), nn.Dropout(0.1), nn.Linear(8, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    parts = model, optimizer, make_trainer(model, optimizer, group=group)
    train = partial(train_at, group, parts, rate)
    train(SIZES[0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = select_minibatch(SIZES, train, *parts)
    after = [parameter.detach() for parameter in model.parameters()]
    changes = [one - other for one, other in zip(before, after, strict=True)]
    with parts[2].trial():  # 1-bit SGD's trials are not double-buffered
        again = train(SIZES[0])
    return found, changes, again, found.accuracies[SIZES[0]]


@pytest.mark.parametrize(
    "make_trainer",
    [
        Synchronous,
        partial(Bmuf, block_size=3),
        partial(OneBit, adagrad=AdaGrad(place=AdaGradPlace.NOWHERE), momentum=0.5),
        partial(
            OneBit, adagrad=AdaGrad(place=AdaGradPlace.NOWHERE), momentum=0.5, double_buffering=True
        ),
    ],
)
def test_a_selection_leaves_no_trace(make_trainer: Any) -> None:
    """Model, trainer and random numbers are as before; the first trial repeats to the bit."""
    for found, changes, again, first in simulate_ranks(2, select, make_trainer, 0.01):
        assert all(not change.any() for change in changes)
        assert again == first
        assert found.num_frames in SIZES


def select_among_spoilt(group: ProcessGroup, make_trainer: Any, is_tried: bool) -> list[Any]:
    """Train, select while rank 1 has a NaN at the second size, train on; accuracies and models."""
    torch.manual_seed(1)
    model = nn.Linear(NUM_INPUTS, NUM_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = make_trainer(model, optimizer, group=group)
    inputs, _ = data()

    def train(size: int) -> float:
        with trainer:
            for step in range(4):
                optimizer.zero_grad()
                is_spoilt = (size, step, group.rank()) == (SIZES[1], 2, 1)
                factor = math.nan if is_spoilt else 1 + group.rank()
                (factor * model(inputs[step :: NUM_FRAMES // 8])).square().sum().backward()
                optimizer.step()
        return 50.0

    train(SIZES[0])
    found = select_minibatch(SIZES, train, model, optimizer, trainer) if is_tried else None
    train(SIZES[0])
    whole_state(model, optimizer, trainer)
    return [
        found and found.accuracies,
        torch.cat([p.detach().flatten() for p in model.parameters()]),
    ]


@pytest.mark.parametrize(
    "make_trainer",
    [
        Synchronous,
        partial(Gtc, gradient_threshold=1 / 64),
        partial(Bmuf, block_size=3),
        partial(Htm, group_size=2, block_size=3, gradient_threshold=1 / 64),
        partial(Htm, group_size=2, block_size=3, gradient_threshold=0.0),
        partial(Htm, group_size=4, block_size=3, gradient_threshold=1 / 64),
        OneBit,
        partial(OneBit, double_buffering=True),
        DPsgd,
        partial(RandPsgd, mixing_seed=1),
        D1dPsgd,
        partial(AdPsgd, mixing_seed=1),
    ],
)
def test_a_trial_that_one_rank_spoils_hurts_that_size_alone(make_trainer: Any) -> None:
    """All ranks find the NaN together, and train on as if nothing had been tried."""
    undisturbed = simulate_ranks(4, select_among_spoilt, make_trainer, False)
    tried = simulate_ranks(4, select_among_spoilt, make_trainer, True)
    for (accuracies, model), (_, expected) in zip(tried, undisturbed, strict=True):
        assert accuracies == pytest.approx({8: 50.0, 16: math.nan}, nan_ok=True)
        assert model.isfinite().all()
        assert torch.equal(model, expected)


EVERY_STEP = CheckpointConfig(steps=1, num_kept=1000)
FRAMES_OF_ALL = 64  # of 2 ranks
HOUR = 3600 / LOW_RATE_FRAME_S


def selecting(
    trainer: str = "synchronous", harmless: float = 100.0, num_minibatches: int = 1
) -> Fit:
    """Select after so many minibatches a rank, by trials of two; a sub-epoch has four or two."""
    config = MinibatchSelectionConfig(
        factors=(1, 2),
        every_hours=num_minibatches * FRAMES_OF_ALL / HOUR,
        trial_hours=2 * FRAMES_OF_ALL / HOUR,
        harmless=harmless,
    )
    what = small_fit(trainer, True, checkpoints=EVERY_STEP, minibatch_frames=32)
    training = replace(what.training, minibatch_selection=config)
    return replace(what, sub_epochs=what.sub_epochs[:4], training=training)


def trials_of(folder: Path, what: Fit) -> list[dict]:
    """Fit on two ranks; return all trials of the curve."""
    write_run(folder)
    manifest, _ = simulate_ranks(2, fit, folder, what)[0]
    return [each for point in manifest.statistics["curve"] for each in point["minibatch_trials"]]


def test_each_frame_is_trained_once_whatever_is_selected(tmp_path: Path) -> None:
    """Trials leave no trace in what is counted: the curve has the frames of a fit without them."""
    what = selecting()
    unselected = replace(what.training, minibatch_selection=MinibatchSelectionConfig())
    plain = replace(what, training=unselected)
    curves = []
    for name, each in (("selecting", what), ("plain", plain)):
        write_run(tmp_path / name)
        manifest, _ = simulate_ranks(2, fit, tmp_path / name, each)[0]
        curves.append(manifest.statistics["curve"])
    for one, other in zip(*curves, strict=True):
        assert one["num_frames"] == other["num_frames"]
    assert curves[0][0] | {"minibatch_trials": []} == curves[1][0] | {"minibatch_trials": []}
    # Steps of two minibatches: fewer of them.
    assert max(steps_saved(tmp_path / "selecting", what)) < max(
        steps_saved(tmp_path / "plain", plain)
    )


def test_a_size_is_taken_within_the_tolerance_and_not_beyond(tmp_path: Path) -> None:
    """A larger size that loses d points is taken at d + .01, and the smaller at d - .01."""
    first = trials_of(tmp_path / "first", selecting(num_minibatches=2))[0]
    small, large = first["accuracies"].values()
    assert small > large + 0.01  # half the updates
    for difference, taken in ((0.01, 64), (-0.01, 32)):
        what = selecting(harmless=small - large + difference, num_minibatches=2)
        trial = trials_of(tmp_path / str(taken), what)[0]
        assert trial == {"frames": taken, "accuracies": first["accuracies"]}


@pytest.mark.parametrize("trainer", ["synchronous", "bmuf", "one_bit", "rand_psgd"])
def test_selection_resumes_from_every_step(tmp_path: Path, trainer: str) -> None:
    """Bitwise: a trial that a kill has interrupted is repeated, and chooses alike."""
    what = selecting(trainer)
    if trainer == "one_bit":
        nowhere = AdaGrad(place=AdaGradPlace.NOWHERE)
        trainer = OneBitConfig(adagrad=nowhere, double_buffering=True)
        what = replace(what, training=replace(what.training, trainer=trainer))
    write_run(tmp_path / "whole")
    expected = simulate_ranks(2, fit, tmp_path / "whole", what)
    assert sum(len(p["minibatch_trials"]) for p in expected[0][0].statistics["curve"]) > 1
    saved = steps_saved(tmp_path / "whole", what)
    for step in saved if trainer == "synchronous" else saved[2:3]:
        stopped = tmp_path / f"stopped-{step}"
        copy_stopped(tmp_path / "whole", what, step, stopped)
        found = simulate_ranks(2, fit, stopped, what)
        assert [model for _, model in found] == [model for _, model in expected]
        assert found[0][0].statistics["curve"] == expected[0][0].statistics["curve"]


def test_a_recipe_names_factors_out_of_order() -> None:
    """Where the recipe is read."""
    with pytest.raises(ConfigurationError, match=r"factors = \[2, 1\]: need ascending numbers"):
        read_recipe(str(TINY), ["student.minibatch_selection.factors=[2,1]"])


def test_a_recipe_selects_for_its_models() -> None:
    """The fit has the section's settings, which are part of the work; sMBR selects nothing."""
    override = "minibatch_selection.factors=[1,2,4]"
    recipe = read_recipe(str(TINY), [f"student.{override}", f"baseline.{override}"])
    for each in (student_fit(recipe), baseline_fit(recipe)):
        assert each.training.minibatch_selection.factors == (1, 2, 4)
        assert each.config["training"]["minibatch_selection"]["factors"] == [1, 2, 4]
        assert sequence_fit(recipe, each).training.minibatch_selection.factors == (1,)


@pytest.mark.parametrize(("hours", "is_due"), [(23.9, False), (24.0, True)])
def test_a_selection_is_due_every_so_much_data(hours: float, is_due: bool) -> None:
    """Every 24 hours of all ranks' frames, as in the paper; never with one factor."""
    config = MinibatchSelectionConfig(factors=(1, 2))
    assert config.is_due(round(hours * HOUR)) == is_due
    assert not MinibatchSelectionConfig().is_due(10**9)
    assert config.num_trial_minibatches(9_000) == 10  # .75 h are 90,000 frames
    assert config.num_trial_minibatches(10**6) == 2  # a step of the largest size


def test_trials_are_not_double_buffered() -> None:
    """The delay would choose smaller sizes (004 5.4): a trial's first step moves the model."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def moves(trainer: OneBit) -> bool:
        before = model.weight.clone()
        model.weight.grad = torch.ones_like(model.weight)
        with trainer:
            optimizer.step()
            return not torch.equal(model.weight, before)

    def seen(group: ProcessGroup) -> list[bool]:
        trainer = OneBit(model, optimizer, group=group, double_buffering=True)
        with trainer.trial():
            within = moves(trainer)
        return [within, moves(trainer)]

    assert simulate_ranks(1, seen)[0] == [True, False]
