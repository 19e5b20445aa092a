"""A cold start on one rank (004 5.2), and training on a share of the data (000 3.2)."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.settings import ConfigurationError
from tests.training.fit.small_fits import copy_stopped, fit, small_fit, steps_saved, write_run
from tests.whole_path.processes import TINY
from training.data.sub_epochs import ColdStart, supervised_sub_epochs
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import Fit, baseline_fit
from training.settings.recipe import CheckpointConfig, read_recipe

EVERY_STEP = CheckpointConfig(steps=1, num_kept=1000)


def cold_fit(trainer: str) -> Fit:
    what = small_fit(trainer, checkpoints=EVERY_STEP, minibatch_frames=16)
    return replace(what, sub_epochs=supervised_sub_epochs([0.02] * 2, 2, cold_start_one_in=2))


def trained(folder: Path, what: Fit, num_ranks: int, of: str) -> tuple[list[float], bytes]:
    """A number of each point of the curve, and the model."""
    manifest, model = simulate_ranks(num_ranks, fit, folder, what)[0]
    return [point[of] for point in manifest.statistics["curve"]], model


@pytest.mark.parametrize("trainer", ["one_bit", "synchronous"])
def test_rank_0_trains_alone_as_one_rank_would(tmp_path: Path, trainer: str) -> None:
    """Its losses are those of a single rank, to the bit; then all ranks share the data."""
    what, found = cold_fit(trainer), {}
    for num_ranks in (1, 3):
        write_run(tmp_path / str(num_ranks))
        place = tmp_path / str(num_ranks)
        found[num_ranks], _ = trained(place, what, num_ranks, "cross_entropy")
    assert found[1][0] == found[3][0]
    assert found[1][1] != found[3][1]
    assert len(found[3]) == 3  # both parts of the first epoch, and the second


def test_a_cold_start_resumes(tmp_path: Path) -> None:
    """From a checkpoint within it: to the same bytes, and on other ranks with all frames."""
    what = cold_fit("one_bit")
    write_run(tmp_path / "whole")
    num_frames, model = trained(tmp_path / "whole", what, 2, "num_frames")
    second = steps_saved(tmp_path / "whole", what)[1]
    for num_ranks in (2, 3):
        stopped = tmp_path / f"stopped-{num_ranks}"
        copy_stopped(tmp_path / "whole", what, second, stopped)
        again, resumed = trained(stopped, what, num_ranks, "num_frames")
        assert again == num_frames
        assert (resumed == model) == (num_ranks == 2)


def test_the_share_of_the_data_is_the_same_in_each_epoch() -> None:
    """One utterance in eight, at the next offset: 250 h of 2,000 (000 3.2)."""
    fits = baseline_fit(read_recipe(str(TINY), ["baseline.data_one_in=8"]))
    assert {(each.share, each.num_shares) for each in fits.sub_epochs} == {(0, 8)}
    cold = ["baseline.cold_start_one_in=13", "baseline.trainer={name='synchronous'}"]
    first, second, *_ = baseline_fit(read_recipe(str(TINY), cold)).sub_epochs
    assert (type(first), first.on_one_rank, second.on_one_rank) == (ColdStart, True, False)
    for more, message in (
        ("baseline.trainer={name='gtc'}", "trainer 'gtc': need 'one_bit' or 'synchronous'"),
        ("baseline.schedule=newbob", "need schedule = 'exponential' and data_one_in = 1"),
        ("baseline.data_one_in=2", "need schedule = 'exponential' and data_one_in = 1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            read_recipe(str(TINY), [*cold, more])
