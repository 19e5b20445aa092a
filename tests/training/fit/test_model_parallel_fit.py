"""A student whose layers two ranks divide, beside a data-parallel trainer: 2 x 2 ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.settings import ConfigurationError
from tests.training.fit.small_fits import copy_stopped, fit, small_fit, steps_saved, write_run
from tests.whole_path.processes import TINY
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import Fit, sequence_fit, sibling_fits, student_fit
from training.settings.models import LstmConfig
from training.settings.recipe import CheckpointConfig, check_ranks, read_recipe

pytestmark = pytest.mark.chaos

EVERY_STEP = CheckpointConfig(steps=1, num_kept=1000)
PLAIN_SGD = 'student.optimizer={ name = "sgd", momentum = 0.0 }'


def divided(trainer: str, num_parts: int = 2, num_layers: int = 1, dropout: float = 0.0) -> Fit:
    """An LSTM of one layer of nine units; gradients are clipped in every step.

    Each frame is an exchange, so that more of layers or steps would take a minute.
    """
    what = small_fit(trainer, True, checkpoints=EVERY_STEP, minibatch_frames=64)
    return replace(
        what,
        model=LstmConfig(num_layers, 9, bidirectional=False, look_ahead=1, dropout=dropout),
        training=replace(what.training, max_gradient_norm=0.01, model_parallel_ranks=num_parts),
        sub_epochs=what.sub_epochs[:2],
    )


@pytest.mark.parametrize("trainer", ["synchronous", "bmuf"])
def test_two_nodes_of_two_ranks_train_what_two_ranks_do(tmp_path: Path, trainer: str) -> None:
    """Losses are those of whole models on two ranks, clipped by the whole norm; one model is left.

    1-bit SGD's are near, as a part's biases are quantized apart: its equality without biases is
    tested in test_split_model.py.
    """
    curves = []
    for num_ranks, num_parts in ((2, 1), (4, 2)):
        folder = tmp_path / str(num_ranks)
        write_run(folder)
        results = simulate_ranks(num_ranks, fit, folder, divided(trainer, num_parts))
        assert len({model for _, model in results}) == 1
        curves.append(results[0][0].statistics["curve"])
    for whole, split in zip(*curves, strict=True):
        assert split["num_frames"] == whole["num_frames"]
        assert split["cross_entropy"] == pytest.approx(whole["cross_entropy"], rel=2e-4)


def test_other_numbers_of_ranks_resume(tmp_path: Path) -> None:
    """Four ranks from a step of four bitwise, with dropout; 2 and 6 resharded, each frame once."""
    what = divided("one_bit", num_layers=2, dropout=0.1)
    write_run(tmp_path / "whole")
    expected = simulate_ranks(4, fit, tmp_path / "whole", what)
    curve = expected[0][0].statistics["curve"]
    # The first step that is kept: what is left of the training differs with the number of ranks.
    step = steps_saved(tmp_path / "whole", what)[0]
    for num_ranks in (4, 2, 6):
        stopped = tmp_path / f"stopped-{num_ranks}"
        copy_stopped(tmp_path / "whole", what, step, stopped)
        results = simulate_ranks(num_ranks, fit, stopped, what)
        assert len({model for _, model in results}) == 1
        found = results[0][0].statistics["curve"]
        assert [point["num_frames"] for point in found] == [p["num_frames"] for p in curve]
        assert (results[0][1] == expected[0][1]) == (num_ranks == 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("student.model_parallel_ranks=0",), r"model_parallel_ranks = 0: need 1\.\.64"),
        (("models.student.num_units=1",), "= 2: need at most 1, models.student.num_units"),
        (('student.precision="bfloat16"',), "precision = 'bfloat16': need 'float32'"),
    ],
)
def test_a_recipe_names_what_cannot_be_divided(settings: tuple[str, ...], message: str) -> None:
    """The value and the remedy, when the recipe is read."""
    with pytest.raises(ConfigurationError, match=message):
        read_recipe(
            str(TINY), ["student.model_parallel_ranks=2", *settings], {"student": "synchronous"}
        )


def test_a_trainer_of_groups_is_refused() -> None:
    """HTM divides the ranks itself."""
    with pytest.raises(ConfigurationError, match="trainer 'htm' divides ranks into groups itself"):
        read_recipe(str(TINY), ["student.model_parallel_ranks=2"], {"student": "htm"})


def test_the_check_of_a_recipe_counts_ranks() -> None:
    """Three ranks are no multiple of two; four are two copies of the model."""
    settings = ["student.model_parallel_ranks=2", PLAIN_SGD]
    recipe = read_recipe(str(TINY), settings, {"student": "one_bit"})
    check_ranks(recipe, "student", 4)
    with pytest.raises(ConfigurationError, match="model_parallel_ranks = 2: need a divisor of 3"):
        check_ranks(recipe, "student", 3)


def test_the_student_alone_is_divided() -> None:
    """Not its sMBR training, nor the bidirectional siblings of later rounds of targets."""
    settings = ["student.model_parallel_ranks=2", "targets.rounds=2"]
    recipe = read_recipe(str(TINY), settings, {"student": "synchronous"})
    student = student_fit(recipe)
    assert student.training.model_parallel_ranks == 2
    assert sequence_fit(recipe, student).training.model_parallel_ranks == 1
    assert [each.training.model_parallel_ranks for each in sibling_fits(recipe)] == [1]
    assert "model_parallel_ranks" not in student_fit(read_recipe(str(TINY))).config
