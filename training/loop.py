"""The training loop: visits, minibatches, an untouched optimizer step (paper 003 V-D)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from training.acoustic_model import AcousticModel
from training.dataset import Dataset, Minibatch, VisitPlan
from training.losses import hard_cross_entropy, kbest_cross_entropy, num_correct
from training.schedule import Visit


@dataclass(slots=True)
class VisitResult:
    """Totals of one visit on one rank: cross-entropy and correct frames are sums over frames."""

    num_frames: int = 0
    cross_entropy: float = 0.0
    num_correct: int = 0

    def add(self, other: "VisitResult") -> None:
        """Add the totals of one minibatch."""
        self.num_frames += other.num_frames
        self.cross_entropy += other.cross_entropy
        self.num_correct += other.num_correct


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Gradients are sums over about `minibatch_frames` frames, clipped at this norm a frame."""

    minibatch_frames: int
    max_gradient_norm: float


def train_visits(
    model: AcousticModel,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset,
    visits: Sequence[Visit],
    first: int,
    config: LoopConfig,
    agree_on_maximum: Callable[[int], int],
    end_of_visit: Callable[[int, VisitResult], None],
    description: str,
) -> None:
    """Train on visits `first`, first + 1, ...; all ranks make the same number of steps."""
    plans = ((index, dataset.plan(visits[index], index)) for index in range(first, len(visits)))
    bar = tqdm(
        total=len(visits), initial=first, desc=description, unit="visit", disable=dataset.rank > 0
    )
    with bar:
        for index, plan in plans:
            for group in optimizer.param_groups:
                group["lr"] = plan.visit.learning_rate
            result = train_visit(model, optimizer, plan, config, agree_on_maximum)
            end_of_visit(index, result)
            mean = result.cross_entropy / max(result.num_frames, 1)
            bar.set_postfix_str(f"cross-entropy {mean:.3f}")
            bar.update()


def train_visit(
    model: AcousticModel,
    optimizer: torch.optim.Optimizer,
    plan: VisitPlan,
    config: LoopConfig,
    agree_on_maximum: Callable[[int], int],
) -> VisitResult:
    """One visit; a rank whose data ends first goes on with empty steps, so nobody waits."""
    model.train()
    total = VisitResult()
    minibatches = plan.minibatches()
    for _ in range(agree_on_maximum(plan.num_minibatches())):
        optimizer.zero_grad()
        minibatch = next(minibatches, None)
        if minibatch is not None:
            total.add(accumulate_gradients(model, minibatch))
            bound = config.max_gradient_norm * config.minibatch_frames
            nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
    return total


def accumulate_gradients(model: AcousticModel, minibatch: Minibatch) -> VisitResult:
    """Add the gradient of the summed cross-entropy of one minibatch."""
    padded = bool((minibatch.lengths < minibatch.features.shape[1]).any())
    # Packing matters only where padding could reach real frames: backwards in time.
    pack = padded and model.config.bidirectional
    logits = model(minibatch.features, minibatch.lengths if pack else None)
    if minibatch.labels is not None:
        loss = hard_cross_entropy(logits, minibatch.labels)
        correct = num_correct(logits, minibatch.labels)
    else:
        assert minibatch.senones is not None
        assert minibatch.probabilities is not None
        loss = kbest_cross_entropy(logits, minibatch.senones, minibatch.probabilities)
        best = minibatch.senones[..., 0].where(minibatch.probabilities[..., 0] > 0, -1)
        correct = num_correct(logits, best)
    loss.backward()  # type: ignore[no-untyped-call]
    return VisitResult(minibatch.num_frames, float(loss.detach()), correct)
