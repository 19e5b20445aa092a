"""sMBR on a small run: expected accuracy rises under every trainer, and training resumes."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from pipeline.runs.names import BASELINE, TEACHER, lattices_step
from tests.training.fit.small_fits import copy_stopped, steps_saved
from tests.training.sequence_training import toy_run
from tests.training.sequence_training.toy_run import (
    CONFIG,
    NUM_ROWS,
    SCALE,
    UNREADABLE,
    rows_of,
    smbr_fit,
    write_toy_run,
)
from tests.whole_path.processes import TINY
from training.data.minibatch import Minibatch
from training.data.targets import SequenceTargets
from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import Fit, SequenceCriterion, baseline_fit, sequence_fit
from training.fit.steps import GradientGraphs, RunningTotals
from training.fit.train_model import fit_model, open_dataset
from training.models.store import log_priors
from training.sequence_training.lattices import generate_lattices
from training.sequence_training.smbr import SmbrBatch
from training.settings.decoding import LatticeConfig
from training.settings.model_training import AugmentationConfig
from training.settings.models import LstmConfig
from training.settings.recipe import read_recipe
from training.settings.trainers import TRAINERS

IN_CI = ("synchronous", "htm", "one_bit", "ad_psgd")
BEAMS = LatticeConfig(ngram_order=1, beam=15.0, lattice_beam=6.0)


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with lattices; one of its eight utterances has none."""
    return write_decoded(tmp_path_factory.mktemp("decoded"))


def write_decoded(folder: Path) -> Path:
    """Write a toy run and the lattices of its baseline."""
    place = write_toy_run(folder)
    with process_group.open_world() as group:
        generate_lattices(*place, BASELINE, CONFIG, BEAMS, SCALE, 0.2, group)
    return Path(place[1])


@pytest.fixture
def run(decoded: Path, tmp_path: Path) -> Path:
    """A copy of that run, to train in."""
    return Path(shutil.copytree(decoded, tmp_path / "run"))


def fit(group: ProcessGroup, folder: Path, what: Fit) -> tuple[Manifest, bytes]:
    store = ObjectStore((str(folder),))
    manifest = fit_model(what, store, str(folder), group).manifest
    return manifest, read_output(store, str(folder), manifest.outputs[0])


def minibatches_of(folder: Path, what: Fit) -> list[Minibatch]:
    """Read the minibatches of the first sub-epoch, as training does."""
    store = ObjectStore((str(folder),))
    with process_group.open_world() as group:
        labelled = read_manifest(store, str(folder), what.labelled)
        dataset = open_dataset(what, store, str(folder), labelled, group)
        return list(dataset.plan(what.sub_epochs[0], 0).minibatches())


@pytest.mark.parametrize(
    "trainer",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos) for name in TRAINERS],
)
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
    what = replace(smbr_fit(), augmentation=placed)
    manifest, _ = simulate_ranks(2, partial(fit, folder=run, what=what))[0]
    assert (manifest.tally_out.utterances, manifest.unselected.utterances) == (4, 3)
    assert manifest.statistics["left_out"].keys() == {"DP1"}
    curve = [point["expected_frame_accuracy"] for point in manifest.statistics["curve"]]
    assert curve[-1] > curve[0]


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
    minibatch, *_ = minibatches_of(run, smbr_fit())
    result = RunningTotals(), torch.zeros(())
    shape = minibatch.features.shape[0], minibatch.features.shape[1]
    graphs = GradientGraphs(torch.nn.Linear(1, 1), lambda _: result, shape)
    assert graphs(minibatch) is result


@pytest.mark.parametrize(("trainer", "num_ranks"), [("synchronous", 1), ("gtc", 2)])
def test_training_resumes_to_the_same_bytes(run: Path, trainer: str, num_ranks: int) -> None:
    """From any step's checkpoint, within a sub-epoch too; the residuals of ranks are in it."""
    what = in_small_steps(smbr_fit(trainer, num_epochs=2, steps=1))
    undisturbed = fit_on_ranks(num_ranks, run, what)
    if trainer == "gtc":
        curve = undisturbed[0].statistics["curve"]
        assert all(point["trainer"]["residual_norm"] > 0 for point in curve)
    saved = steps_saved(run, what)
    assert len(saved) >= 4
    for step in (saved[0], saved[2]):
        stopped = run.parent / f"stopped-{step}"
        copy_stopped(run, what, step, stopped)
        resumed = fit_on_ranks(num_ranks, stopped, what)
        assert (resumed[0].to_bytes(), resumed[1]) == (undisturbed[0].to_bytes(), undisturbed[1])


def in_small_steps(what: Fit) -> Fit:
    """Let ranks take more than one step a sub-epoch."""
    return replace(what, training=replace(what.training, minibatch_frames=32))


def fit_on_ranks(num_ranks: int, folder: Path, what: Fit) -> tuple[Manifest, bytes]:
    """Fit on simulated ranks, which end with the same model."""
    results = simulate_ranks(num_ranks, fit, folder, what)
    assert len({model for _, model in results}) == 1
    return results[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_resumes(run: Path, num_ranks: int) -> None:
    """Every frame with a lattice is trained on once a sub-epoch, and the accuracy still rises."""
    what = in_small_steps(smbr_fit("gtc", steps=1))
    expected = fit_on_ranks(2, run, what)[0].statistics["curve"]
    step = steps_saved(run, what)[2]
    copy_stopped(run, what, step, run.parent / "stopped")
    statistics = fit_on_ranks(num_ranks, run.parent / "stopped", what)[0].statistics
    curve = statistics["curve"]
    assert statistics["num_ranks"] == num_ranks
    assert [point["num_frames"] for point in curve] == [each["num_frames"] for each in expected]
    assert curve[-1]["expected_frame_accuracy"] > curve[0]["expected_frame_accuracy"] + 0.01


@pytest.mark.chaos
def test_gtc_on_16_ranks_trains_on_every_utterance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the paper does it (003 VII-C3); each rank has an utterance or two, and all resume."""
    monkeypatch.setattr(toy_run, "NUM_ROWS", (10, 8))
    folder, what = write_decoded(tmp_path / "made"), smbr_fit("gtc", num_epochs=3)
    manifest, model = fit_on_ranks(16, folder, what)
    rows = [row for part in (0, 1) for row in rows_of(part) if row.utterance_id != UNREADABLE]
    curve = manifest.statistics["curve"]
    num_frames = sum(len(row.features) // 3 for row in rows)
    assert {(point["num_ranks"], point["num_frames"]) for point in curve} == {(16, num_frames)}
    assert curve[-1]["expected_frame_accuracy"] > 1.1 * curve[0]["expected_frame_accuracy"]
    assert all(0 < point["trainer"]["density"] < 0.5 for point in curve)
    copy_stopped(folder, what, steps_saved(folder, what)[0], tmp_path / "stopped")
    resumed = fit_on_ranks(16, tmp_path / "stopped", what)
    assert (resumed[0].to_bytes(), resumed[1]) == (manifest.to_bytes(), model)


def test_minibatches_hold_the_decoded_utterances_whole(run: Path) -> None:
    """Each once, with its own lattice and labels; the one without lattice is left out."""
    minibatches = minibatches_of(run, smbr_fit())
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
    decoded = [len(row.features) // 3 for row in rows if row.utterance_id != UNREADABLE]
    assert sorted(lengths) == sorted(decoded)


def recipe_fit(*settings: str) -> Fit:
    """Describe the baseline's sMBR by a recipe with such settings, for the toy run's form."""
    form = ["models.student.num_units=12", "models.student.look_ahead=1"]
    own = [f"sequence_training.{each}" for each in ("num_epochs=1", "minibatch_frames=64")]
    given = [f"sequence_training.{each}" for each in settings]
    recipe = read_recipe(str(TINY), [*form, *own, *given])
    return sequence_fit(recipe, baseline_fit(recipe))


def first_batch(run: Path, what: Fit) -> SmbrBatch:
    """Read the lattices of the first minibatch."""
    targets = minibatches_of(run, what)[0].targets
    assert isinstance(targets, SequenceTargets)
    return targets.lattices


def test_a_recipes_criterion_weights_the_lattices(run: Path) -> None:
    """Its scale weighs scores and priors, its boost each right frame, and neither anything else."""
    what = recipe_fit("acoustic_scale=0.25", "boost=0.5")
    assert what.criterion == SequenceCriterion(lattices_step(BASELINE), 0.25, 0.5)
    found = first_batch(run, what)
    plain = first_batch(run, recipe_fit("acoustic_scale=1.0"))
    assert (found.acoustic_scale, plain.acoustic_scale) == (0.25, 1.0)
    counts = read_manifest(ObjectStore((str(run),)), str(run), what.labelled).statistics[
        "senone_counts"
    ]
    # An arc that reads no frame has no prior.
    priors = np.append(log_priors(counts).numpy()[found.cells[2]], 0.0)[found.arc_cells]
    difference = 0.75 * priors - 0.5 * found.accuracies
    np.testing.assert_allclose(found.log_weights - plain.log_weights, difference, atol=1e-6)
    assert 0 < found.accuracies.sum() < len(found.accuracies)
