"""The networks of papers 004 and 001: contract, sizes, window, and the scale of gradients."""

import pytest
import torch

from pipeline.filterbank import NUM_INPUTS
from training.models.contract import check_contract
from training.models.losses import hard_cross_entropy
from training.models.parameter_count import num_parameters
from training.models.store import make_model
from training.settings.models import FeedForwardConfig, ModelConfig, ProjectedBlstmConfig

SMALL: list[ModelConfig] = [
    FeedForwardConfig(num_layers=2, num_units=8),
    FeedForwardConfig(num_layers=1, num_units=8, unit="relu", left_frames=0, look_ahead=0),
    ProjectedBlstmConfig(num_layers=2, num_units=8, num_projected_units=4),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", SMALL)
def test_they_keep_the_contract(config: ModelConfig, precision) -> None:
    """As every model must: padding, look-ahead, pieces, determinism. Its parameters are counted."""
    check_contract(config, 7, precision)
    assert num_parameters(config, 7) == sum(p.numel() for p in make_model(config, 7).parameters())


def test_they_have_the_papers_sizes() -> None:
    """004 5 says 46 M, of a front end that it does not describe; 001 5.2 says 165 MB of float32."""
    network = FeedForwardConfig(num_layers=7, num_units=2048)
    assert num_parameters(network, 9304) == pytest.approx(46e6, rel=0.02)
    blstm = ProjectedBlstmConfig(num_layers=6, num_units=512, num_projected_units=256)
    # Its inputs have 260 dimensions: 68 more, of four gates each way.
    num_more = (260 - NUM_INPUTS) * 4 * 512 * 2
    assert 4 * (num_parameters(blstm, 32_000) + num_more) == pytest.approx(165 * 2**20, rel=0.01)


@pytest.mark.parametrize("unit", ["sigmoid", "relu"])
def test_gradients_reach_the_first_of_seven_layers(unit) -> None:
    """By torch's own initialization a sigmoid's vanish: 1e-5 of the last layer's."""
    torch.manual_seed(0)
    model = make_model(FeedForwardConfig(num_layers=7, num_units=64, unit=unit), 20)
    frames, labels = torch.randn(8, 32, NUM_INPUTS), torch.randint(20, (8, 32))
    hard_cross_entropy(model(frames), labels).backward()
    sizes = [float(p.grad.abs().mean()) for p in model.parameters() if p.ndim == 2]
    assert min(sizes) > 0.02 * max(sizes)
