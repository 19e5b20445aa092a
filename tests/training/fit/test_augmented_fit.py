"""A model's augmentation decides its training, and a training that was stopped resumes with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.configuration import ConfigurationError
from pipeline.runs.names import realignment_rounds
from tests.training.fit.small_fits import copy_stopped, fit, small_fit, steps_saved, write_run
from tests.training.fit.test_optimizer_settings import recipe
from training.configuration.augmentation import AugmentationConfig
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import aligner_fit, baseline_fit, student_fit, teacher_fit
from training.recipes import CheckpointConfig

AUGMENTED = AugmentationConfig(speed=(0.9, 1.1), time_masks=1, frequency_masks=1)


def test_an_augmented_training_resumes(tmp_path: Path) -> None:
    """Stopped within a sub-epoch, it makes the same model bit by bit; without, another one."""
    plain = small_fit(student=True, checkpoints=CheckpointConfig(steps=3, num_kept=1000))
    what = replace(plain, augmentation=AUGMENTED)
    write_run(tmp_path / "whole")
    expected = simulate_ranks(2, fit, tmp_path / "whole", what)
    saved = steps_saved(tmp_path / "whole", what)
    copy_stopped(tmp_path / "whole", what, saved[1], tmp_path / "stopped")
    assert simulate_ranks(2, fit, tmp_path / "stopped", what) == expected
    write_run(tmp_path / "plain")
    assert simulate_ranks(2, fit, tmp_path / "plain", plain)[0][1] != expected[0][1]


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
            f"{section}.augmentation.time_masks=3", f"{section}.augmentation.speed=[1.1]"
        )
        on = AugmentationConfig(speed=(1.1,), time_masks=3)
        found = {name: describe(changed).augmentation for name, describe in fits.items()}
        assert found == {name: on if name == section else off for name in fits}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("speed=[0.4]", r"speed\[0\] = 0.4: need 0.5..2"),
        ("speed=[]", r"speed = \(\): need 1..16 items"),
        ("frequency_mask_bins=65", "frequency_mask_bins = 65: need 1..64"),
        ("time_mask_share=1.5", "time_mask_share = 1.5: need 0.001..1"),
        ("time_mask=2", "unknown key time_mask: did you mean time_masks"),
    ],
)
def test_settings_beyond_their_ranges_are_refused(setting: str, message: str) -> None:
    """The message names section, value and bound."""
    with pytest.raises(ConfigurationError, match=f"baseline: augmentation: {message}"):
        recipe(f"baseline.augmentation.{setting}")
