"""The sMBR criterion is the paths' expected accuracy, and its gradient is that of every path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_INPUTS
from pipeline.shards import Lattice
from tests.training.sequence_training.random_lattices import (
    NUM_SENONES,
    paths_of,
    random_lattice,
    seeds,
)
from training.models.lstm import LstmModel
from training.sequence_training.smbr import AlignedLattice, Smbr, SmbrBatch, smbr_loss
from training.settings.models import LstmConfig

FRAMES = (1, 3, 2)
UNIFORM = np.zeros(NUM_SENONES)


def utterances(seed: int) -> list[AlignedLattice]:
    rng = np.random.default_rng(seed)
    return [random_lattice(rng, num_frames) for num_frames in FRAMES]


def logits_of(seed: int, look_ahead: int = 0) -> torch.Tensor:
    shape = len(FRAMES), max(FRAMES) + look_ahead, NUM_SENONES
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, shape)).requires_grad_()


def enumerated(utterance: AlignedLattice, scores: np.ndarray, criterion: Smbr) -> float:
    """Return the expected number of right frames, path by path, without logarithms of sums."""
    log_weights, accuracies = [], []
    for path in paths_of(utterance.lattice):
        senones = list(path.senones)
        acoustic = (scores - criterion.log_priors)[np.arange(len(senones)), senones].sum()
        accuracies.append(np.count_nonzero(senones == utterance.reference))
        boosted = criterion.boost * accuracies[-1]
        log_weights.append(criterion.acoustic_scale * acoustic - path.graph_cost - boosted)
    weights = np.exp(np.array(log_weights) - max(log_weights))
    return float(weights @ accuracies / weights.sum())


@settings(deadline=None, max_examples=30)
@given(seeds, st.sampled_from((0.25, 1.0, 3.0)), st.sampled_from((0.0, 0.5)))
def test_expected_accuracy_is_that_of_all_paths(
    seed: int, acoustic_scale: float, boost: float
) -> None:
    """On random lattices, side by side, it is within 1e-9 of the enumeration of every path."""
    log_priors = np.log(np.random.default_rng(seed).dirichlet(np.ones(NUM_SENONES)))
    criterion = Smbr(acoustic_scale, boost, log_priors)
    drawn, logits = utterances(seed), logits_of(seed, look_ahead=2)
    loss = smbr_loss(logits, SmbrBatch.of(drawn, 2, criterion))
    outputs = logits.detach().numpy()[:, 2:]
    expected = sum(
        enumerated(each, scores[: len(each.reference)], criterion)
        for each, scores in zip(drawn, outputs, strict=True)
    )
    assert loss.item() == pytest.approx(-expected, abs=1e-9)


@settings(deadline=None, max_examples=3)
@given(seeds)
def test_gradient_is_that_of_the_expected_accuracy(seed: int) -> None:
    """torch.autograd.gradcheck finds the finite differences of the loss, for all logits."""
    batch = SmbrBatch.of(utterances(seed), 1, Smbr(0.7, 0.2, UNIFORM))
    logits = logits_of(seed, look_ahead=1)
    assert torch.autograd.gradcheck(lambda x: smbr_loss(x, batch), (logits,), atol=1e-7)


def test_gradient_reaches_every_weight_of_a_network() -> None:
    """Finite differences through a whole LSTM, in float64, are the gradients of its weights."""
    torch.manual_seed(3)
    config = LstmConfig(1, 4, bidirectional=False, look_ahead=1, dropout=0.0)
    model = LstmModel(config, NUM_SENONES).double()
    features = torch.randn(len(FRAMES), max(FRAMES) + 1, NUM_INPUTS, dtype=torch.float64)
    batch = SmbrBatch.of(utterances(11), 1, Smbr(0.8, 0.1, UNIFORM))
    smbr_loss(model(features), batch).backward()
    step = 1e-5
    for parameter in model.parameters():
        assert parameter.grad is not None
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            losses = []
            for moved in (step, -step):
                parameter.add_(direction, alpha=moved)
                losses.append(smbr_loss(model(features), batch).item())
                parameter.add_(direction, alpha=-moved)
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx((parameter.grad * direction).sum().item(), abs=1e-7, rel=1e-5)


def test_a_weight_beyond_exponents_is_no_overflow() -> None:
    """Logits of +-1e4 leave the value and its gradient finite: sums are of logarithms."""
    logits = logits_of(5).detach() * 3e3
    logits.requires_grad_()
    loss = smbr_loss(logits, SmbrBatch.of(utterances(5), 0, Smbr(1.0, 0.0, UNIFORM)))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_every_arc_may_read_a_frame() -> None:
    """Lattices of others need no arc without frame at their end: the gradient has all cells."""
    whole = np.array([1, 1], np.int32), np.array([0, 1], np.int32)
    ends = np.array([0, 0], np.int32), np.array([1, 1], np.int32)
    lattice = Lattice(*whole, *ends, np.array([1, 2], np.uint16), np.zeros(2, np.float32))
    utterance = AlignedLattice(lattice, np.array([1]))
    logits = torch.zeros(1, 1, NUM_SENONES, dtype=torch.float64).requires_grad_()
    loss = smbr_loss(logits, SmbrBatch.of([utterance], 0, Smbr(1.0, 0.0, UNIFORM)))
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)
    assert logits.grad is not None
    assert logits.grad[0, 0, :2].tolist() == pytest.approx([0.25, -0.25])
