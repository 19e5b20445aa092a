"""Fitting a model on a small run: every trainer learns, repeats, and is found again."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.settings import ConfigurationError
from infra.store.object_store import join_uri
from pipeline.runs.manifest import Manifest, read_manifest
from tests.training.fit.small_fits import copy_stopped, small_fit, write_run
from tests.training.fit.small_fits import fit as fit_on
from training.algorithms.learning_rates import MinRateNewbob
from training.distributed import process_group
from training.distributed.simulated_group import simulate_ranks
from training.fit import steps, train_model
from training.fit.model_specs import Fit
from training.fit.steps import minibatch_loss
from training.fit.train_model import fit_model
from training.fit.training_loop import Fitting
from training.models.acoustic_model import AcousticModel
from training.models.precision import set_float32_products
from training.models.store import load_model
from training.settings.model_training import SoftTargetsForm
from training.settings.recipe import CheckpointConfig


def fit(folder: Path, what: Fit) -> tuple[Manifest, bytes]:
    """Fit in this process alone."""
    with process_group.open_world() as group:
        return fit_on(group, folder, what)


@pytest.mark.parametrize(
    ("trainer", "numbers"),
    [
        ("synchronous", set()),
        ("gtc", {"density", "residual_norm"}),
        ("bmuf", {"block_update_norm", "block_residual_norm"}),
        ("sparse_loco", {"block_update_norm", "block_residual_norm"}),
        ("one_bit", {"residual_norm", "stripe_residual_norm"}),
        ("htm", {"density", "residual_norm", "block_update_norm", "block_residual_norm"}),
        ("d_psgd", set()),
        ("d1d_psgd", set()),
        ("rand_psgd", set()),
        ("ad_psgd", {"mean_staleness", "max_staleness"}),
    ],
)
def test_every_trainer_learns_and_says_what_it_exchanged(
    tmp_path: Path, trainer: str, numbers: set[str]
) -> None:
    """Cross-entropy falls; bytes of each sub-epoch of both ranks, and the trainer's own numbers."""
    store, run_uri = write_run(tmp_path)
    what = replace(small_fit(trainer, group_size=2), sub_epochs=small_fit().sub_epochs[:2])
    manifest = simulate_ranks(2, partial(fit_model, what, store, run_uri))[0].manifest
    curve = manifest.statistics["curve"]
    assert curve[-1]["cross_entropy"] < curve[0]["cross_entropy"]
    points = [point["trainer"] for point in curve]
    assert all(point.keys() == {"bytes_sent"} | numbers for point in points)
    sent = [point["bytes_sent"] for point in points]
    assert sum(sent) > 0
    if trainer == "synchronous":
        model = load_model(store, run_uri, "baseline", what.model).model
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert all(each % (2 * 4 * num_trained) == 0 < each for each in sent)
    for point in points:
        assert 0 < point.get("density", 0.5) < 1
        assert all(point.get(name, 1.0) > 0 for name in ("residual_norm", "stripe_residual_norm"))
        assert (point.get("block_residual_norm", 0.0) > 0) == (
            trainer == "sparse_loco" and point["bytes_sent"] > 0
        )
        assert 0 <= point.get("mean_staleness", 0.0) <= point.get("max_staleness", 0) <= 16


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    """Weights, curve and manifest repeat to the bit, at another place too."""
    results = []
    for name in ("first", "second"):
        write_run(tmp_path / name)
        manifest, model = fit(tmp_path / name, small_fit(student=True))
        results.append((manifest.to_bytes(), model))
    assert results[0] == results[1]
    assert manifest.tally_out.utterances == 16


def test_a_fitted_model_is_not_fitted_again(tmp_path: Path) -> None:
    """The second call finds the manifest, however many ranks call; another recipe is refused."""
    store, run_uri = write_run(tmp_path)
    fit(tmp_path, small_fit())
    saved_often = replace(small_fit(), checkpoints=CheckpointConfig(1, 5))
    for what in (small_fit(), saved_often):
        found = simulate_ranks(2, partial(fit_model, what, store, run_uri))
        assert all(result.was_finished for result in found)
    with process_group.open_world() as group, pytest.raises(ValueError, match="another recipe"):
        fit_model(small_fit("bmuf"), store, run_uri, group)
    assert store.exists(join_uri(run_uri, "models/baseline/manifest.json"))
    assert read_manifest(store, run_uri, "models/baseline").statistics["curve"]


def test_the_largest_seed_is_trained_with(tmp_path: Path) -> None:
    """2^64 - 1 is a seed on every rank, though each adds its number to it."""
    store, run_uri = write_run(tmp_path)
    what = small_fit(student=True)
    what = replace(what, training=replace(what.training, seed=2**64 - 1))
    for result in simulate_ranks(2, partial(fit_model, what, store, run_uri)):
        assert result.manifest.config["training"]["seed"] == 2**64 - 1


def test_ranks_that_make_no_groups_are_bad_usage(tmp_path: Path) -> None:
    """They are refused as a configuration, before any data is read."""
    store, run_uri = write_run(tmp_path)
    what = small_fit("htm", group_size=3)
    with pytest.raises(ConfigurationError, match="baseline: trainer: group_size = 3: need a div"):
        simulate_ranks(2, partial(fit_model, what, store, run_uri))


def test_only_steps_use_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation and what follows in the process do not, whether the fit ran there or was found."""
    used = []

    def noted(model: AcousticModel, *args: Any) -> Any:
        used.append((model.training, *float32_products()))
        return minibatch_loss(model, *args)

    monkeypatch.setattr(steps, "minibatch_loss", noted)
    write_run(tmp_path)
    what = replace(small_fit(), newbob=MinRateNewbob(1e-30, 1e-31), validation_one_in=4)
    what = replace(
        what, sub_epochs=what.sub_epochs[:2], training=replace(what.training, precision="tf32")
    )
    fit(tmp_path, what)
    assert set(used) == {(True, "tf32", "tf32"), (False, "ieee", "ieee")}
    assert float32_products() == ("ieee", "ieee")
    set_float32_products("tf32")
    fit(tmp_path, what)
    assert float32_products() == ("ieee", "ieee")


def float32_products() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.rnn.fp32_precision


def test_the_form_reaches_the_loss(tmp_path: Path) -> None:
    """Sub-epochs before the first with soft targets are the same; those with them differ."""
    plain = small_fit(student=True)
    curves = []
    forms: tuple[SoftTargetsForm, ...] = ("renormalized", "ghost", "best")
    for form in forms:
        what = replace(plain, training=replace(plain.training, soft_targets=form))
        folder = tmp_path / form
        write_run(folder)
        ((manifest, _),) = simulate_ranks(1, fit_on, folder, what)
        curves.append(manifest.statistics["curve"])
        assert manifest.config["training"]["soft_targets"] == form
    first = [point["labelled"] for point in curves[0]].index(False)
    assert curves[0][:first] == curves[1][:first] == curves[2][:first]
    assert len({curve[first]["cross_entropy"] for curve in curves}) == len(forms)


class FlatFitting(Fitting):
    """FlatFitting lays an LSTM's weights out in one piece, as cuDNN wants them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        weights = self.model.lstm._flat_weights
        flat = torch.cat([each.detach().reshape(-1) for each in weights])
        places = flat.split([each.numel() for each in weights])
        for weight, place in zip(weights, places, strict=True):
            weight.data = place.view(weight.shape)

    def run(self) -> list[dict[str, Any]]:
        """Train, and look where the weights then are."""
        before = [each.data_ptr() for each in self.model.parameters()]
        curve = super().run()
        assert [each.data_ptr() for each in self.model.parameters()] == before
        assert [each.data_ptr() for each in self.model.lstm._flat_weights] == before[:-2]
        return curve


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["synchronous", "htm"])
def test_weights_keep_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From first to last step, and on resuming: graphs read there, and cuDNN need not copy."""
    monkeypatch.setattr(train_model, "Fitting", FlatFitting)
    write_run(tmp_path / "run")
    what = small_fit(name, group_size=2, checkpoints=CheckpointConfig(steps=3, num_kept=100))
    simulate_ranks(4, fit_on, tmp_path / "run", what)
    copy_stopped(tmp_path / "run", what, 3, tmp_path / "stopped")
    simulate_ranks(4, fit_on, tmp_path / "stopped", what)
