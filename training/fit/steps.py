"""The training loop: minibatches, an untouched optimizer step (paper 003 V-D)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.data.minibatch import Minibatch
from training.models.acoustic_model import AcousticModel


@dataclass(slots=True)
class FrameTotals:
    """Totals of a sub-epoch on one rank: cross-entropy and correct frames are sums over frames."""

    num_frames: int = 0
    cross_entropy: float = 0.0
    num_correct: int = 0

    def add(self, other: "FrameTotals") -> None:
        """Add the totals of one minibatch."""
        self.num_frames += other.num_frames
        self.cross_entropy += other.cross_entropy
        self.num_correct += other.num_correct


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Gradients are sums over about `minibatch_frames` frames, clipped at this norm a frame."""

    minibatch_frames: int
    max_gradient_norm: float


def take_steps(
    model: AcousticModel,
    optimizer: torch.optim.Optimizer,
    minibatches: Iterator[Minibatch],
    num_steps: int,
    config: LoopConfig,
) -> Iterator[FrameTotals]:
    """Take one step after the other, yielding each one's totals when it is taken.

    A rank whose data ends first goes on with empty steps, so nobody waits. FloatingPointError for a
    gradient that is not finite, before it is anybody else's and before it is in a checkpoint.
    """
    model.train()
    for _ in range(num_steps):
        optimizer.zero_grad()
        minibatch = next(minibatches, None)
        result = FrameTotals()
        if minibatch is not None:
            loss, result = minibatch_loss(model, minibatch)
            loss.backward()  # type: ignore[no-untyped-call]
            bound = config.max_gradient_norm * config.minibatch_frames
            _require_finite(nn.utils.clip_grad_norm_(model.parameters(), bound))
        optimizer.step()
        yield result


def _require_finite(gradient_norm: Tensor) -> None:
    if not math.isfinite(norm := float(gradient_norm)):
        raise FloatingPointError(
            f"the gradient's norm is {norm}: look at this rank's last minibatch, or lower the "
            "learning rate, and go on from a checkpoint"
        )


def minibatch_loss(model: AcousticModel, minibatch: Minibatch) -> tuple[Tensor, FrameTotals]:
    """The summed cross-entropy of one minibatch, to differentiate and in numbers."""
    padded = bool((minibatch.lengths < minibatch.features.shape[1]).any())
    # Packing matters only where padding could reach real frames: backwards in time.
    pack = padded and model.config.bidirectional
    logits = model(minibatch.features, minibatch.lengths if pack else None)
    loss = minibatch.targets.cross_entropy(logits)
    correct = minibatch.targets.num_correct(logits)
    return loss, FrameTotals(minibatch.num_frames, float(loss.detach()), correct)
