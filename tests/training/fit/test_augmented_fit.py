"""A model's augmentation decides its training, and a training that was stopped resumes with it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from infra.settings import ConfigurationError
from pipeline.records import Tally
from pipeline.runs.names import realignment_rounds
from tests.training.fit.small_fits import copy_stopped, fit, small_fit, steps_saved, write_run
from tests.training.fit.test_optimizer_settings import recipe
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import (
    aligner_fit,
    baseline_fit,
    sequence_fit,
    sibling_fits,
    student_fit,
    teacher_fit,
)
from training.settings.model_training import AugmentationConfig
from training.settings.recipe import CheckpointConfig

AUGMENTED = AugmentationConfig(speed=(0.9, 1.1), time_masks=1, frequency_masks=1)
PLACED = {number: ("clean", "DP1", "DP3")[number % 3] for number in range(16)}
SOME = AugmentationConfig(placements=("DP3", "clean"))


def test_an_augmented_training_resumes(tmp_path: Path) -> None:
    """Stopped within a sub-epoch, it makes the same model bit by bit; without, another one."""
    checkpoints = CheckpointConfig(steps=2, num_kept=1000)
    plain = small_fit(student=True, checkpoints=checkpoints, minibatch_frames=32)
    what = replace(plain, augmentation=replace(AUGMENTED, placements=SOME.placements))
    write_run(tmp_path / "whole", PLACED)
    expected = simulate_ranks(2, fit, tmp_path / "whole", what)
    folder = tmp_path / "whole" / "models" / "student" / "checkpoints"
    within = [
        step
        for step in steps_saved(tmp_path / "whole", what)
        if json.loads((folder / f"{step:012d}.json").read_text())["place"]["share"]
    ]
    copy_stopped(tmp_path / "whole", what, within[1], tmp_path / "stopped")
    assert simulate_ranks(2, fit, tmp_path / "stopped", what) == expected
    write_run(tmp_path / "plain", PLACED)
    assert simulate_ranks(2, fit, tmp_path / "plain", plain)[0][1] != expected[0][1]


@pytest.mark.parametrize("student", [False, True])
def test_a_model_trains_on_its_placements_alone(tmp_path: Path, student: bool) -> None:
    """As on a corpus of these placements, bit by bit; the manifest counts what was left out."""
    what = small_fit(student=student)
    write_run(tmp_path / "whole", PLACED)
    write_run(tmp_path / "these", PLACED, SOME.placements)
    found, model = simulate_ranks(2, fit, tmp_path / "whole", replace(what, augmentation=SOME))[0]
    alone, expected = simulate_ranks(2, fit, tmp_path / "these", what)[0]
    assert model == expected
    assert found.tally_out == alone.tally_out
    # Three of utterances 0 to 7 are at DP1, and two of 8 to 15.
    left_out = Tally(5, 4500) if student else Tally(3, 2700)
    assert found.unselected == left_out
    assert found.statistics["left_out"] == {"DP1": asdict(left_out)}
    assert found.tally_in == found.tally_out + left_out
    write_run(tmp_path / "plain", PLACED)
    assert simulate_ranks(2, fit, tmp_path / "plain", what)[0][1] != model


@pytest.mark.parametrize(
    ("placed", "names", "message"),
    [
        (PLACED, ("clean", "DP9"), "= DP9: no utterance is there: need some of DP1, DP3"),
        (
            {n: "clean" if n < 8 else "DP1" for n in range(16)},
            ("clean",),
            "= clean: leaves nothing of partitions/unlabelled: need some of DP1",
        ),
        ({}, ("clean",), r"no utterance is there: the partitions name no placement: need place"),
        ({3: "clean"}, ("DP1",), "no utterance is there: need some of all, clean"),
    ],
)
def test_placements_without_an_utterance_are_refused(
    tmp_path: Path, placed: dict[int, str], names: tuple[str, ...], message: str
) -> None:
    """By name, with those that are known, before training begins, on all ranks."""
    write_run(tmp_path / "run", placed)
    augmentation = AugmentationConfig(placements=names)
    what = replace(small_fit(student=True), augmentation=augmentation)
    with pytest.raises(ConfigurationError, match=f"student: augmentation.placements.*{message}"):
        simulate_ranks(2, fit, tmp_path / "run", what)
    assert not (tmp_path / "run" / "models").exists()


def test_sequence_training_keeps_the_placements() -> None:
    """And the other models of the student's form do; speeds and masks are left out."""
    changed = recipe(
        'student.augmentation.placements=["clean"]',
        "student.augmentation.speed=[1.1]",
        "targets.rounds=2",
    )
    (sibling,) = sibling_fits(changed)
    assert sibling.augmentation == student_fit(changed).augmentation
    smbr = sequence_fit(changed, sibling).augmentation
    assert smbr == AugmentationConfig(placements=("clean",))


def test_each_model_has_its_own_augmentation() -> None:
    """A table in a model's section reaches that model's fit, and no other one's."""
    fits = {
        "aligner": lambda recipe: aligner_fit(recipe, realignment_rounds(1)[0]),
        "baseline": baseline_fit,
        "teacher": teacher_fit,
        "student": student_fit,
    }
    off = AugmentationConfig()
    for section in fits:
        changed = recipe(
            f"{section}.augmentation.time_masks=3",
            f"{section}.augmentation.speed=[1.1]",
            f'{section}.augmentation.placements=["clean", "DP3"]',
        )
        on = AugmentationConfig(speed=(1.1,), time_masks=3, placements=("clean", "DP3"))
        found = {name: describe(changed).augmentation for name, describe in fits.items()}
        assert found == {name: on if name == section else off for name in fits}
