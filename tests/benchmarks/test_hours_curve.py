"""Runs of the hours' curve read equally many frames."""

import pytest

from jobs.cli.arguments import recipe_path
from tests.benchmarks.hours_curve import NUM_SUB_EPOCHS, overrides
from training.settings.recipe import read_recipe


@pytest.mark.parametrize("hours", [0.5, 1, 2, 5, 10, 20])
def test_students_read_the_same_hours_in_the_same_sub_epochs(hours: float) -> None:
    """Passes times hours is the most; the labelled share after each sub-epoch is the same."""
    student = read_recipe(recipe_path("demo"), overrides(hours, 20, 3)).student
    assert student.num_passes * hours == 20
    assert student.num_passes * student.num_sub_epochs == NUM_SUB_EPOCHS
    assert student.seed == 3


def test_the_baseline_reads_as_many_frames_as_the_student() -> None:
    """20 hours, and a third of 0.3 labelled hours after each of 40 sub-epochs: 80 times these."""
    assert read_recipe(recipe_path("demo"), overrides(5, 20, 3)).baseline.num_epochs == 80


@pytest.mark.parametrize("hours", [3, 7.7, 6.667])
def test_hours_without_whole_passes_are_refused(hours: float) -> None:
    """Another number of frames would be another experiment."""
    with pytest.raises(ValueError, match=rf"hours = {hours:g}: need 20 divided by"):
        overrides(hours, 20, 3)
