"""Fits that change their number of ranks or their offsets, newbob's schedule, and clipping."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.cli.job import recipe_path
from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import select_kbest
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.names import DEV_ALIGNMENT_STEP, PARTITIONS_STEP
from pipeline.shards import KBestAtAllOffsets, read_partition, write_partition
from tests.training.fit.small_fits import (
    DECAY,
    NUM_SENONES,
    copy_stopped,
    fit,
    partition,
    small_fit,
    speech,
    steps_saved,
    write_run,
    write_step,
)
from tests.training.training_settings import training_settings
from training.algorithms.learning_rates import MinRateNewbob, NewbobState
from training.data.dataset import Dataset
from training.data.minibatch import Minibatch
from training.data.sub_epochs import scheduled_learning_sub_epochs
from training.data.targets import HardTargets
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import Fit, baseline_fit
from training.fit.steps import GradientNorms, clip_gradients, take_steps, validate
from training.fit.train_model import NOT_VALIDATED
from training.models.lstm import LstmModel
from training.models.store import make_model
from training.settings.models import LstmConfig
from training.settings.recipe import CheckpointConfig, read_recipe

EVERY_STEP = CheckpointConfig(steps=1, num_kept=1000)
NEWBOB = MinRateNewbob(0.05, 0.01)


@pytest.mark.parametrize(
    ("trainer", "num_ranks"), [("synchronous", 4), ("gtc", 1), ("bmuf", 3), ("htm", 1)]
)
def test_another_number_of_ranks_resumes(tmp_path: Path, trainer: str, num_ranks: int) -> None:
    """Every frame of every sub-epoch is trained on once, also resumed within one; losses fall."""
    what = small_fit(trainer, True, checkpoints=EVERY_STEP, minibatch_frames=32)
    what = replace(what, sub_epochs=what.sub_epochs[:6])
    write_run(tmp_path / "whole")
    manifest, _ = simulate_ranks(2, fit, tmp_path / "whole", what)[0]
    expected = manifest.statistics["curve"]
    for step in (3, 8):  # of 2 steps a sub-epoch and 3 a block
        stopped = tmp_path / f"stopped-{step}"
        copy_stopped(tmp_path / "whole", what, step, stopped)
        results = simulate_ranks(num_ranks, fit, stopped, what)
        assert len({model for _, model in results}) == 1
        statistics = results[0][0].statistics
        curve = statistics["curve"]
        assert [point["num_frames"] for point in curve] == [p["num_frames"] for p in expected]
        assert curve[: step // 2] == expected[: step // 2]
        assert curve[-1]["cross_entropy"] < curve[1]["cross_entropy"]
        assert statistics["num_ranks"] == num_ranks


def test_a_fit_says_where_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the step and the sub-epoch; short sub-epochs write none of their own."""
    monkeypatch.setattr("infra.log_lines.PROGRESS_INTERVAL_S", 3600.0)
    what = small_fit("synchronous", True, checkpoints=EVERY_STEP, minibatch_frames=32)
    what = replace(what, sub_epochs=what.sub_epochs[:6])
    write_run(tmp_path / "whole")
    simulate_ranks(1, fit, tmp_path / "whole", what)
    assert "sub-epoch" not in capsys.readouterr().err
    step = steps_saved(tmp_path / "whole", what)[1]
    copy_stopped(tmp_path / "whole", what, step, tmp_path / "stopped")
    simulate_ranks(1, fit, tmp_path / "stopped", what)
    said, line = capsys.readouterr().err.splitlines()
    assert NOT_VALIDATED in said
    assert line.endswith(f"train student: resume after step {step}, in sub-epoch 0 of 6")


def test_a_recipe_chooses_newbob_and_how_often_to_save() -> None:
    """Its rates are the schedule's bounds; how often it is saved changes nothing of the work."""
    plain = baseline_fit(read_recipe(recipe_path("demo")))
    assert (plain.newbob, plain.validation_one_in) == (None, 0)
    assert plain.checkpoints == CheckpointConfig(steps=1000, num_kept=2)
    overrides = ["baseline.schedule=newbob", "baseline.validation_one_in=10", "checkpoints.steps=7"]
    chosen = baseline_fit(read_recipe(recipe_path("demo"), overrides))
    assert chosen.newbob == MinRateNewbob(2e-3, 2e-4)
    assert chosen.validation_one_in == 10
    assert [step for step in range(1, 22) if chosen.checkpoints.is_due(step)] == [7, 14, 21]
    assert not CheckpointConfig(steps=0).is_due(1)
    assert replace(chosen, checkpoints=CheckpointConfig()).config == chosen.config


def newbob_fit(num_epochs: int = 16, trainer: str = "synchronous") -> Fit:
    """At most so many epochs on six of the eight labelled utterances."""
    what = small_fit(trainer, checkpoints=EVERY_STEP)
    sub_epochs = [replace(what.sub_epochs[0], offset=epoch % 3) for epoch in range(num_epochs)]
    return replace(what, sub_epochs=sub_epochs, newbob=NEWBOB, validation_one_in=4)


def test_newbob_decides_on_rates_and_on_the_end(tmp_path: Path) -> None:
    """The rates are those that its validation losses call for; two utterances are left out."""
    write_run(tmp_path)
    manifest, _ = simulate_ranks(1, fit, tmp_path, newbob_fit())[0]
    curve = manifest.statistics["curve"]
    state: NewbobState | None = NEWBOB.begin()
    for point in curve:
        assert state is not None
        assert point["learning_rate"] == state.rate
        assert point["num_frames"] in (6 * 30, 6 * 29)  # offset 0, or 1 and 2: a frame less
        state = NEWBOB.after_epoch(state, point["validation_cross_entropy"])
    assert state is None
    assert len(curve) < 16
    assert curve[-1]["cross_entropy"] < curve[0]["cross_entropy"]


def test_newbob_ends_after_the_most_epochs(tmp_path: Path) -> None:
    """Though its rate is not at the least yet."""
    write_run(tmp_path)
    manifest, _ = simulate_ranks(1, fit, tmp_path, newbob_fit(num_epochs=2))[0]
    assert len(manifest.statistics["curve"]) == 2


def test_all_ranks_validate_together(tmp_path: Path) -> None:
    """Each has a part of the utterances left out; the loss is one process's, but for rounding."""
    losses = []
    for num_ranks in (1, 2):
        write_run(tmp_path / str(num_ranks))
        what = replace(newbob_fit(num_epochs=1), newbob=MinRateNewbob(1e-30, 1e-31))
        manifest, _ = simulate_ranks(num_ranks, fit, tmp_path / str(num_ranks), what)[0]
        losses.append(manifest.statistics["curve"][0]["validation_cross_entropy"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_newbob_resumes(tmp_path: Path) -> None:
    """Bitwise, its state being in the checkpoint; each epoch ends the block of BMUF."""
    what = newbob_fit(3, "bmuf")
    write_run(tmp_path / "whole")
    expected = simulate_ranks(2, fit, tmp_path / "whole", what)
    for step in steps_saved(tmp_path / "whole", what)[1::2]:
        stopped = tmp_path / f"stopped-{step}"
        copy_stopped(tmp_path / "whole", what, step, stopped)
        assert simulate_ranks(2, fit, stopped, what) == expected


def test_newbob_needs_a_share_to_validate_on(tmp_path: Path) -> None:
    """The setting is checked with the fit; data that leave no utterance out, when validated on."""
    with pytest.raises(ValueError, match="validation_one_in = 0: need at least 2"):
        replace(newbob_fit(), validation_one_in=0)
    store, run_uri = write_run(tmp_path)
    dataset = Dataset(store, run_uri, (), (), 1, 64, 1, 0, 1, validation_one_in=4)
    model = make_model(newbob_fit().model, 6)
    with pytest.raises(ValueError, match="validation_one_in = 4: leaves no utterance out"):
        simulate_ranks(1, lambda group: validate(model, dataset, group))


def test_development_speakers_without_an_alignment_are_refused(tmp_path: Path) -> None:
    """By name, before training, and no labelled speaker is left out instead."""
    store, run_uri = write_run(tmp_path)
    spec = StepSpec(store, run_uri, DEV_ALIGNMENT_STEP, {})
    run_step(spec, lambda step: step.lossless(Tally(), ()))
    what = replace(newbob_fit(), validation=DEV_ALIGNMENT_STEP)
    with pytest.raises(ValueError, match=r"alignments/dev: no utterance of the development"):
        simulate_ranks(1, fit, tmp_path, what)


def student(rotates: bool) -> Fit:
    """Four passes of one sub-epoch each, saved at every other step."""
    saves = CheckpointConfig(steps=2, num_kept=1000)
    made = small_fit("synchronous", True, checkpoints=saves, minibatch_frames=128)
    return replace(
        made, sub_epochs=scheduled_learning_sub_epochs(DECAY, 1, 1, 1.2, 2, rotates=rotates)
    )


def write_rotating_run(folder: Path) -> None:
    """The small run, with targets at all offsets: those at one offset are among them."""
    store, run_uri = write_run(folder)
    (folder / PARTITIONS_STEP / "manifest.json").unlink()
    rows = []
    for number, row in enumerate(read_partition(partition(soft=True))):
        _, senones = speech(number + 8)
        logits = 4 * np.eye(NUM_SENONES, dtype=np.float32)[senones[1:-1]]
        rows.append(replace(row, targets=KBestAtAllOffsets(select_kbest(logits, 3))))
    write_step(store, run_uri, PARTITIONS_STEP, write_partition(rows), offsets="all")


def test_a_rotating_student_resumes_in_any_pass(tmp_path: Path) -> None:
    """Bitwise; each pass counts the frames of its offset, and pass 0 is that of one offset.

    Where no pass rotates, targets at all offsets make the model of those at one, to the byte.
    """
    what, still = student(rotates=True), student(rotates=False)
    write_rotating_run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "still")
    expected = simulate_ranks(1, fit, tmp_path / "whole", what)
    curve = expected[0][0].statistics["curve"]
    assert [point["num_frames"] for point in curve[::2]] == [8 * 30, 8 * 29, 8 * 29, 8 * 30]
    write_run(tmp_path / "one")
    ((one, model),) = simulate_ranks(1, fit, tmp_path / "one", still)
    assert curve[0] == one.statistics["curve"][0]
    assert curve[2] != one.statistics["curve"][2]
    assert simulate_ranks(1, fit, tmp_path / "still", still)[0][1] == model
    steps = steps_saved(tmp_path / "whole", what)
    copy_stopped(tmp_path / "whole", what, steps[len(steps) // 2], tmp_path / "stopped")
    assert simulate_ranks(1, fit, tmp_path / "stopped", what) == expected


def test_of_targets_at_one_offset_only_the_best_rotate(tmp_path: Path) -> None:
    """Others are refused before the first step, and not after the hours of the first pass."""
    write_run(tmp_path)
    what = student(rotates=True)
    with pytest.raises(ValueError, match="partitions/unlabelled: its targets are at one offset"):
        simulate_ranks(1, fit, tmp_path, what)
    assert not list((tmp_path / "models").rglob("*.npz"))
    best = replace(what, training=replace(what.training, soft_targets="best"))
    ((manifest, _),) = simulate_ranks(1, fit, tmp_path, best)
    curve = manifest.statistics["curve"]
    assert [point["num_frames"] for point in curve[::2]] == [8 * 30, 8 * 29, 8 * 29, 8 * 30]


CONFIG = training_settings(minibatch_frames=20, max_gradient_norm=1.0)


def minibatch(broken: float) -> Minibatch:
    features = torch.randn(2, 10, NUM_INPUTS, generator=torch.Generator().manual_seed(0))
    features[1, 4, 7] = broken
    labels = torch.zeros(2, 10, dtype=torch.long)
    return Minibatch(features, torch.tensor([10, 10]), HardTargets(labels))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_gradient_ends_training_before_it_is_applied(broken: float) -> None:
    """Whatever the trainer: weights stay what they were, so that no checkpoint can hold a NaN."""
    model = LstmModel(LstmConfig(1, 8, False, 0, 0.0), 5)
    optimizer = torch.optim.Adam(model.parameters())
    minibatches = iter([minibatch(0), minibatch(broken)])
    steps = take_steps(model, optimizer, minibatches, 2, CONFIG, GradientNorms(3, 40))
    next(steps)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(
        FloatingPointError, match="rank 3, step 42: the gradient's norm is nan: look at"
    ):
        next(steps)
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("share", [0.5, 0.989, 0.991, 1.0, 1.001, 4.0, float("nan")])
def test_gradients_are_clipped_as_torch_clips(share: float) -> None:
    """To the bit, on both sides of the bound and at it; the norm is that before clipping."""
    gradients = [
        torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 9)
    ]
    bound = float(torch.nn.utils.get_total_norm(gradients)) / share
    clipped, expected = ([torch.nn.Parameter(each.clone()) for each in gradients] for _ in range(2))
    for parameters in (clipped, expected):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
    norm = clip_gradients(clipped, bound)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(expected, bound))
    for own, right in zip(clipped, expected, strict=True):
        assert own.grad is not None
        torch.testing.assert_close(own.grad, right.grad, rtol=0, atol=0, equal_nan=True)
