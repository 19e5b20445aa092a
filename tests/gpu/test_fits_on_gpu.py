"""Whole trainings on a GPU: the same bytes again, after a stop, and with every trainer."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Manifest, read_output
from tests.training.fit.small_fits import copy_stopped, small_fit, steps_saved, write_run
from training.data import row_order
from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import shared_device, simulate_ranks
from training.fit import steps
from training.fit.model_specs import Fit
from training.fit.train_model import fit_model
from training.fit.training_loop import Fitting
from training.models.store import load_model
from training.settings.recipe import CheckpointConfig
from training.settings.trainers import TRAINERS

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose minibatches are four chunks of eight frames."""
    monkeypatch.setattr(row_order, "CHUNK_FRAMES", 8)
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessGroup]:
    """One rank on the GPU, by NCCL."""
    with process_group.open_world(60, torch.device("cuda")) as group:
        yield group


def fit(
    group: ProcessGroup, folder: Path, what: Fit, device: torch.device
) -> tuple[Manifest, bytes]:
    store = ObjectStore((str(folder),))
    manifest = fit_model(what, store, str(folder), group, device).manifest
    return manifest, read_output(store, str(folder), manifest.outputs[0])


def copied(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.parent / name))


def small(trainer: str = "synchronous", steps: int = 0) -> Fit:
    """A student without dropout, which cuDNN's own random numbers would keep from repeating."""
    checkpoints = CheckpointConfig(steps=steps, num_kept=100)
    what = small_fit(
        trainer, student=True, group_size=2, minibatch_frames=32, checkpoints=checkpoints
    )
    return replace(what, model=replace(what.model, dropout=0.0))


def losses(manifest: Manifest) -> list[float]:
    return [point["cross_entropy"] for point in manifest.statistics["curve"]]


def test_a_fit_is_repeated_and_resumed_to_the_byte(
    gpu: torch.device, run: Path, world: ProcessGroup
) -> None:
    """From checkpoints of any step, with graphs and fused Adam; the model is loaded on a CPU."""
    what = small(steps=1)
    undisturbed = fit(world, copied(run, "first"), what, gpu)
    again = fit(world, copied(run, "again"), what, gpu)
    assert again[1] == undisturbed[1]
    saved = steps_saved(run.parent / "first", what)
    for step in (saved[0], saved[len(saved) // 2], saved[-2]):
        copy_stopped(run.parent / "first", what, step, run.parent / f"stopped-{step}")
        assert fit(world, run.parent / f"stopped-{step}", what, gpu)[1] == undisturbed[1]
    folder = run.parent / "first"
    loaded = load_model(ObjectStore((str(folder),)), str(folder), what.name, what.model)
    assert loaded.model.device == CPU


def test_graphs_change_no_byte(
    gpu: torch.device, run: Path, world: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a student's fit, from hard and soft targets, chunks and whole utterances."""
    with_graphs = fit(world, copied(run, "graphs"), small(), gpu)
    monkeypatch.setattr(steps, "is_captured_on", lambda _: False)
    assert fit(world, copied(run, "none"), small(), gpu)[1] == with_graphs[1]


def test_a_fit_moves_between_devices(gpu: torch.device, run: Path, world: ProcessGroup) -> None:
    """Stopped on a CPU and resumed on a GPU, and the other way round, it ends alike."""
    what = small(steps=1)
    expected = losses(fit(world, copied(run, "cpu"), what, CPU)[0])
    step = steps_saved(run.parent / "cpu", what)[6]
    copy_stopped(run.parent / "cpu", what, step, run.parent / "moved")
    moved = losses(fit(world, run.parent / "moved", what, gpu)[0])
    copy_stopped(run.parent / "moved", what, step + 4, run.parent / "back")
    back = losses(fit(world, run.parent / "back", what, CPU)[0])
    assert moved == pytest.approx(expected, rel=1e-3)
    assert back == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_ranks_that_share_the_gpu_train_as_on_a_cpu(
    gpu: torch.device, run: Path, trainer: str
) -> None:
    """Four ranks of each trainer: losses are a CPU's to rounding, or near where messages decide."""
    found = []
    for device, name in ((CPU, "cpu"), (gpu, "gpu")):
        train = partial(fit, folder=copied(run, name), what=small(trainer), device=device)
        results = simulate_ranks(4, train, device=shared_device(device))
        assert len({data for _, data in results}) == 1
        found.append(losses(results[0][0]))
    assert found[1] == pytest.approx(found[0], rel=0.05)


@pytest.mark.parametrize("trainer", ["synchronous", "gtc", "bmuf", "htm", "one_bit", "sparse_loco"])
def test_no_step_of_a_trainer_waits(
    gpu: torch.device, run: Path, world: ProcessGroup, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    """torch itself refuses whatever would wait for the GPU within a sub-epoch's steps."""
    train, num_watched = Fitting._train, []

    def watched(self: Fitting, *args: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            num_watched.append(1)
            return train(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Fitting, "_train", watched)
    what = small(trainer)
    if trainer == "htm":
        trainer = replace(what.training.trainer, group_size=1)
        what = replace(what, training=replace(what.training, trainer=trainer))
    fit(world, copied(run, trainer), what, gpu)
    assert len(num_watched) == len(what.sub_epochs)
