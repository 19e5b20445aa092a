"""sMBR on a small run: expected accuracy rises under every trainer, and training resumes."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from pipeline.runs.names import BASELINE, TEACHER, lattices_step
from tests.training.fit.small_fits import copy_stopped, steps_saved
from tests.training.sequence_training.toy_run import (
    CONFIG,
    NUM_ROWS,
    SCALE,
    rows_of,
    smbr_fit,
    write_toy_run,
)
from training.configuration.augmentation import AugmentationConfig
from training.configuration.models import LstmConfig
from training.configuration.targets import LatticeConfig
from training.configuration.trainers import TRAINERS
from training.data.dataset import Dataset
from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.fit.cuda_graph import GradientGraphs
from training.fit.model_specs import Fit
from training.fit.steps import RunningTotals
from training.fit.train_model import fit_model, open_dataset
from training.targets.lattices import generate_lattices
from training.targets.sequence import SequenceTargets

BEAMS = LatticeConfig(ngram_order=1, beam=15.0, lattice_beam=6.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with lattices; one of its eight utterances has none."""
    place = write_toy_run(tmp_path / "made")
    with process_group.open_world() as group:
        generate_lattices(*place, BASELINE, CONFIG, BEAMS, SCALE, 0.2, group)
    return Path(place[1])


def fit(group: ProcessGroup, folder: Path, what: Fit) -> tuple[Manifest, bytes]:
    store = open_store(folder)
    manifest = fit_model(what, store, str(folder), group).manifest
    return manifest, read_output(store, str(folder), manifest.outputs[0])


def open_store(folder: Path) -> ObjectStore:
    return ObjectStore((str(folder),))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_expected_accuracy_rises_under_every_trainer(run: Path, trainer: str) -> None:
    """On two ranks, from the model that cross-entropy left; the curve says so."""
    manifest = simulate_ranks(2, partial(fit, folder=run, what=smbr_fit(trainer)))[0][0]
    curve = [point["expected_frame_accuracy"] for point in manifest.statistics["curve"]]
    assert curve[-1] > curve[0] + 0.01
    assert all(0 < point < 1 for point in curve)
    assert manifest.tally_out.utterances == sum(NUM_ROWS) - 1
    assert {lattices_step(BASELINE), f"models/{BASELINE}"} < manifest.inputs.keys()


def test_a_model_is_trained_on_at_its_placements(run: Path) -> None:
    """Of seven utterances with a lattice, four are clean; nothing else is trained on."""
    placed = AugmentationConfig(placements=("clean",))
    manifest, model = simulate_ranks(
        2, partial(fit, folder=run, what=replace(smbr_fit(), augmentation=placed))
    )[0]
    assert (manifest.tally_out.utterances, manifest.unselected.utterances) == (4, 3)
    assert manifest.statistics["left_out"].keys() == {"DP1"}
    curve = [point["expected_frame_accuracy"] for point in manifest.statistics["curve"]]
    assert curve[-1] > curve[0]
    shutil.rmtree(run / manifest.step)
    every = replace(placed, placements=("clean", "DP1"))
    named, plain = (
        simulate_ranks(2, partial(fit, folder=folder, what=what))[0]
        for folder, what in (
            (run, replace(smbr_fit(), augmentation=every)),
            (shutil.copytree(run, run.with_name("copy")), smbr_fit()),
        )
    )
    assert named[1] == plain[1] != model


def test_a_bidirectional_teacher_is_trained_on(tmp_path: Path) -> None:
    """It sees all frames, without look-ahead, in minibatches with padding."""
    form = LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0)
    place = write_toy_run(tmp_path, TEACHER, form)
    with process_group.open_world() as group:
        generate_lattices(*place, TEACHER, form, BEAMS, SCALE, 0.2, group)
        what = smbr_fit("gtc", name=TEACHER, config=form)
        manifest, _ = fit(group, Path(place[1]), what)
    curve = [point["expected_frame_accuracy"] for point in manifest.statistics["curve"]]
    assert curve[-1] > curve[0]


def test_no_graph_replays_lattices(run: Path) -> None:
    """Whole utterances that have the shape of chunks still take a step of their own."""
    what, store = smbr_fit(), open_store(run)
    with process_group.open_world() as group:
        labelled = read_manifest(store, str(run), what.labelled)
        dataset = open_dataset(what, store, str(run), labelled.outputs, group)
    minibatch = next(dataset.plan(what.sub_epochs[0], 0).minibatches())
    result = RunningTotals(), torch.zeros(())
    shape = minibatch.features.shape[0], minibatch.features.shape[1]
    graphs = GradientGraphs(torch.nn.Linear(1, 1), lambda _: result, shape)
    assert graphs(minibatch) is result


def test_training_resumes_to_the_same_bytes(run: Path) -> None:
    """From any step's checkpoint, within a sub-epoch too."""
    what = smbr_fit(num_epochs=2, steps=1)
    with process_group.open_world() as group:
        undisturbed = fit(group, run, what)
        saved = steps_saved(run, what)
        assert len(saved) >= 4
        for step in (saved[0], saved[2]):
            stopped = run.parent / f"stopped-{step}"
            copy_stopped(run, what, step, stopped)
            resumed = fit(group, stopped, what)
            assert (resumed[0].to_bytes(), resumed[1]) == (
                undisturbed[0].to_bytes(),
                undisturbed[1],
            )


def test_minibatches_hold_the_decoded_utterances_whole(run: Path) -> None:
    """Each once, with its own lattice and labels; the one without lattice is left out."""
    what = smbr_fit()
    store = open_store(run)
    with process_group.open_world() as group:
        labelled = read_manifest(store, str(run), what.labelled)
        dataset: Dataset = open_dataset(what, store, str(run), labelled.outputs, group)
    minibatches = list(dataset.plan(what.sub_epochs[0], 0).minibatches())
    assert len(minibatches) > 1
    lengths = []
    for minibatch in minibatches:
        targets = minibatch.targets
        assert isinstance(targets, SequenceTargets)
        row, output, senone = targets.lattices.cells
        for number, length in enumerate(minibatch.lengths.tolist()):
            # The look-ahead's first output speaks of no frame.
            assert set(output[row == number]) == set(range(1, length))
            labels = targets.labels[number, 1:length].tolist()
            cells = set(zip(output[row == number], senone[row == number], strict=True))
            assert set(enumerate(labels, start=1)) <= cells
            lengths.append(length - 1)
    rows = [row for partition in range(len(NUM_ROWS)) for row in rows_of(partition)]
    decoded = [len(row.features) // 3 for row in rows if row.utterance_id != "utterance-0-2"]
    assert sorted(lengths) == sorted(decoded)
