"""Steps of training around an untouched optimizer, and the validation loss (paper 003 V-D)."""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from infra.configuration import LATER
from training.data.dataset import Dataset
from training.data.minibatch import Minibatch
from training.data.sub_epochs import SubEpoch
from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.models.acoustic_model import AcousticModel

VALIDATION = SubEpoch(True, 0, 1, 0, False, 0.0, is_validation=True)
"""The utterances left out, in chunks, always at offset 0: losses of epochs are comparable."""


@dataclass(slots=True)
class FrameTotals:
    """FrameTotals: one rank's sums over the frames of a sub-epoch."""

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
    """LoopConfig: gradients are sums over about `minibatch_frames`, clipped at a norm a frame.

    The learning rate rises over the first `warm_up_steps` of all training.
    """

    minibatch_frames: int
    max_gradient_norm: float
    warm_up_steps: int = field(default=0, metadata=LATER)


def take_steps(
    model: AcousticModel,
    optimizer: torch.optim.Optimizer,
    minibatches: Iterator[Minibatch],
    num_steps: int,
    config: LoopConfig,
) -> Iterator[FrameTotals]:
    """Take one step after the other, and yield each one's totals when it is taken.

    A rank whose data ends first continues with empty steps, so that no rank waits. Raises
    FloatingPointError for a gradient that is not finite, before another rank or a checkpoint
    receives it.
    """
    model.train()
    for _ in range(num_steps):
        optimizer.zero_grad()
        minibatch = next(minibatches, None)
        result = FrameTotals()
        if minibatch is not None:
            loss, result = minibatch_loss(model, minibatch)
            loss.backward()  # type: ignore[no-untyped-call]
            # The gradient is a sum over frames, so its bound grows with the minibatch.
            bound = config.max_gradient_norm * config.minibatch_frames
            _require_finite(nn.utils.clip_grad_norm_(model.parameters(), bound))
        # Out of data, a rank still sends what GTC's residual holds.
        optimizer.step()
        yield result


def _require_finite(gradient_norm: Tensor) -> None:
    if not math.isfinite(norm := float(gradient_norm)):
        raise FloatingPointError(
            f"the gradient's norm is {norm}: look at this rank's last minibatch, or lower the "
            "learning rate, and resume from a checkpoint"
        )


def minibatch_loss(model: AcousticModel, minibatch: Minibatch) -> tuple[Tensor, FrameTotals]:
    """Return a minibatch's summed cross-entropy, to differentiate, and its totals as numbers."""
    padded = bool((minibatch.lengths < minibatch.features.shape[1]).any())
    # Packing matters only where padding could reach real frames: backwards in time.
    pack = padded and model.config.bidirectional
    logits = model(minibatch.features, minibatch.lengths if pack else None)
    loss = minibatch.targets.cross_entropy(logits)
    correct = minibatch.targets.num_correct(logits)
    return loss, FrameTotals(minibatch.num_frames, float(loss.detach()), correct)


def validation_loss(model: AcousticModel, dataset: Dataset, group: ProcessGroup) -> float:
    """Return the mean cross-entropy a frame over what training leaves out, the same on all ranks.

    Draws no random number. Raises ValueError if no utterance is left out.
    """
    model.eval()
    total = FrameTotals()
    with torch.no_grad(), closing(dataset.plan(VALIDATION, 0).minibatches()) as minibatches:
        for minibatch in minibatches:
            total.add(minibatch_loss(model, minibatch)[1])
    sums = torch.tensor([total.num_frames, total.cross_entropy], dtype=torch.float64)
    collectives.all_reduce_sum(sums, group)
    num_frames, cross_entropy = map(float, sums)
    if num_frames == 0:
        raise ValueError(
            f"validation_one_in = {dataset.validation_one_in}: leaves no utterance out of "
            "training: need at least one for newbob's loss"
        )
    return cross_entropy / num_frames
