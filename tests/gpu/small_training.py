"""The student's form on one minibatch after another, small enough to compare devices."""

import torch
from torch import Tensor

from pipeline.filterbank import NUM_INPUTS
from training.data.minibatch import Minibatch, Targets
from training.data.targets import HardTargets, SoftTargets
from training.models.lstm import LstmModel
from training.settings.models import LstmConfig

NUM_SENONES, NUM_CHUNKS, FRAMES = 300, 16, 32


def student(device: torch.device, dropout: float = 0.0, bidirectional: bool = False) -> LstmModel:
    """Make a model of three layers, the same on every device."""
    torch.manual_seed(1)
    look_ahead = 0 if bidirectional else 3
    config = LstmConfig(3, 256, bidirectional, look_ahead, dropout)
    return LstmModel(config, NUM_SENONES).to(device)


def minibatch(number: int, device: torch.device, is_soft: bool) -> Minibatch:
    """Make chunks of noise with hard targets, or with the ten best of drawn logits."""
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(NUM_CHUNKS, FRAMES, NUM_SENONES, generator=generator)
    targets: Targets = HardTargets(logits.argmax(-1).to(device))
    if is_soft:
        best = logits.topk(10)
        targets = SoftTargets(best.indices.to(device), best.values.softmax(-1).to(device))
    features = torch.randn(NUM_CHUNKS, FRAMES, NUM_INPUTS, generator=generator)
    return Minibatch(features.to(device), torch.full((NUM_CHUNKS,), FRAMES), targets)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected| over all elements, in float64."""
    expected = expected.detach().cpu().double()
    return float((found.detach().cpu().double() - expected).norm() / expected.norm())
