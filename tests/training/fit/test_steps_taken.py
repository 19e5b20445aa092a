"""The loop around an untouched optimizer step."""

import pytest
import torch

from training.data.minibatch import Minibatch
from training.data.targets import HardTargets
from training.fit.model_specs import LoopConfig
from training.fit.steps import GradientNorms, clip_gradients, take_steps
from training.models.lstm import LstmModel
from training.settings.models import LstmConfig

CONFIG = LoopConfig(minibatch_frames=20, max_gradient_norm=1.0)


def minibatch(broken: float) -> Minibatch:
    features = torch.randn(2, 10, 192, generator=torch.Generator().manual_seed(0))
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
