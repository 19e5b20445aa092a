"""Repeat the trainers' golden trajectories bit for bit on simulated ranks."""

import pytest

from tests.trajectories.exact_training import NUM_RANKS, NUM_STEPS, minibatch, train
from tests.trajectories.record import FOLDER, NAMES, golden_path, read


@pytest.mark.parametrize(("trainer_name", "optimizer_name"), NAMES)
def test_repeats_the_recorded_trajectory(trainer_name: str, optimizer_name: str) -> None:
    """Models after every step, the final model, residuals and momenta equal the recorded ones."""
    golden = read(golden_path(trainer_name, optimizer_name))
    repeated = train(trainer_name, optimizer_name)
    assert len(golden.steps) == NUM_STEPS
    for number, steps in enumerate(zip(repeated.steps, golden.steps, strict=True)):
        assert steps[0] == steps[1], f"differs from step {number} on"
    assert repeated == golden


def test_trajectories_are_all_different_and_complete() -> None:
    """Each trainer and optimizer has one file, and no two trainings are equal."""
    paths = [golden_path(*names) for names in NAMES]
    assert sorted(FOLDER.glob("*.json")) == sorted(paths)
    assert len({read(path).steps[-1].digest for path in paths}) == len(paths)
    assert len({read(path).state_digest for path in paths}) == len(paths)


def test_arithmetic_is_exact() -> None:
    """Inputs are integers and targets quarters, so products and sums are exact in any order."""
    for step in range(NUM_STEPS):
        for rank in range(NUM_RANKS):
            inputs, targets = minibatch(step, rank)
            assert all((values * 4 % 1 == 0).all() for values in (inputs, targets))
            assert inputs.abs().max() <= 3
