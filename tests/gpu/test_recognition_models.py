"""Sequence training, alignment's scores and a Conformer on a GPU are a CPU's, to rounding."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import BASELINE
from tests.gpu.small_training import NUM_SENONES, minibatch, relative_error
from tests.training.sequence_training.toy_run import CONFIG, SCALE, rows_of, smbr_fit, write_toy_run
from tests.training.training_settings import training_settings
from training.align.network_alignment import log_likelihoods
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import shared_device, simulate_ranks
from training.fit.steps import compute_gradients
from training.fit.train_model import fit_model
from training.models.store import load_model, make_model
from training.sequence_training.lattices import generate_lattices
from training.settings.decoding import LatticeConfig
from training.settings.models import ConformerConfig

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
BEAMS = LatticeConfig(ngram_order=1, beam=15.0, lattice_beam=6.0)


def toy_run(folder: Path) -> tuple[ObjectStore, str, str]:
    """A run with lattices."""
    place = write_toy_run(folder)

    def generate(group: ProcessGroup) -> None:
        generate_lattices(*place, BASELINE, CONFIG, BEAMS, SCALE, 0.2, group)

    simulate_ranks(1, generate)
    return place


def test_sequence_training_is_the_cpus(gpu: torch.device, tmp_path: Path) -> None:
    """The expected frame accuracy of every sub-epoch, on two ranks: lattices are on the host."""
    curves = []
    for device in (CPU, gpu):
        store, run_uri, _ = toy_run(tmp_path / device.type)

        def train(group: ProcessGroup, store=store, run_uri=run_uri, device=device) -> Manifest:
            return fit_model(smbr_fit(), store, run_uri, group, device).manifest

        curve = simulate_ranks(2, train, device=shared_device(device))[0].statistics["curve"]
        curves.append([point["expected_frame_accuracy"] for point in curve])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def test_log_likelihoods_are_the_cpus(gpu: torch.device, tmp_path: Path) -> None:
    """As alignment and lattices take them, on the host."""
    store, run_uri, _ = write_toy_run(tmp_path)
    trained = load_model(store, run_uri, BASELINE, CONFIG)
    expected = log_likelihoods(rows_of(0), trained, SCALE)
    found = log_likelihoods(rows_of(0), trained.to(gpu), SCALE)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_a_conformers_gradients_are_the_cpus(gpu: torch.device) -> None:
    """Of chunks with padding, which it masks."""
    gradients = []
    for device in (CPU, gpu):
        torch.manual_seed(0)
        form = ConformerConfig(num_layers=2, num_units=64, num_heads=4, dropout=0.0)
        model = make_model(form, NUM_SENONES).to(device)
        given = minibatch(0, device, is_soft=True)
        given.lengths[::3] = 20
        partial(compute_gradients, model, training_settings(512, 0.5))(given)
        gradients.append(torch.cat([each.grad.flatten().cpu() for each in model.parameters()]))
    assert relative_error(gradients[1], gradients[0]) < 1e-4
