"""State-level minimum Bayes risk: expected frame accuracy over lattices (paper 003 II-C).

Kingsbury 2009; Vesely et al. 2013. The expected accuracy of an utterance is
sum over paths of P(path) times the number of frames at which the path's senone is the reference's,
with P(path) proportional to exp(acoustic_scale * log p(x | path) + log p(path)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Integer
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.shards import Lattice
from training.sequence_training.forward_backward import LatticeBatch, forward_backward


@dataclass(frozen=True, slots=True, eq=False)
class Smbr:
    """Smbr holds the criterion's settings: `acoustic_scale` is kappa of 003 II-A2.

    `boost` lowers a path's log weight for each frame at which it is right, so that paths with more
    errors count more (boosted MMI's b); 0 for none.
    """

    acoustic_scale: float
    boost: float
    log_priors: Float[np.ndarray, " senones"]


@dataclass(frozen=True, slots=True, eq=False)
class AlignedLattice:
    """AlignedLattice: an utterance's lattice, and the reference's senone at each of its frames."""

    lattice: Lattice
    reference: Integer[np.ndarray, " frames"]

    def __post_init__(self) -> None:
        assert len(self.reference) == self.lattice.num_frames, "a senone for each frame"


@dataclass(frozen=True, slots=True, eq=False)
class SmbrBatch:
    """SmbrBatch: the lattices of a minibatch, all that the network does not decide worked out.

    The network gives the score of each of the `cells`: row, output and senone of the logits.
    `arc_cells` has each arc's cell, and the number of cells for an arc that reads no frame.
    """

    lattices: LatticeBatch
    log_weights: Float64[np.ndarray, " arcs"]
    accuracies: Float64[np.ndarray, " arcs"]
    arc_cells: Int64[np.ndarray, " arcs"]
    cells: Int64[np.ndarray, "3 cells"]
    acoustic_scale: float

    @classmethod
    def of(cls, utterances: Sequence[AlignedLattice], delay: int, criterion: Smbr) -> "SmbrBatch":
        """Join the utterances of a minibatch, row after row; frame t is output t + delay."""
        columns = [_arc_columns(row, each) for row, each in enumerate(utterances)]
        rows, frames, senones, correct = np.concatenate(columns, axis=1)
        reads = senones >= 0
        chosen = np.stack([rows, frames + delay, senones])[:, reads]
        # Each cell once, so that gradients add up here, in a fixed order, on any device.
        shape = tuple(chosen.max(axis=1) + 1)
        unique, numbers = np.unique(np.ravel_multi_index(tuple(chosen), shape), return_inverse=True)
        arc_cells = np.full(len(reads), len(unique))
        arc_cells[reads] = numbers
        costs = np.concatenate([each.lattice.graph_costs for each in utterances])
        # A hybrid system divides posteriors by priors (003 II-A); logits differ from log
        # posteriors by a constant a frame, which is the same on all paths.
        priors = np.where(reads, criterion.log_priors[np.maximum(senones, 0)], 0.0)
        log_weights = -costs.astype(np.float64) - criterion.acoustic_scale * priors
        return cls(
            lattices=LatticeBatch.of([each.lattice for each in utterances]),
            log_weights=log_weights - criterion.boost * correct,
            accuracies=correct.astype(np.float64),
            arc_cells=arc_cells,
            cells=np.stack(np.unravel_index(unique, shape)),
            acoustic_scale=criterion.acoustic_scale,
        )

    def expected_accuracies(
        self, scores: Float64[np.ndarray, " cells"]
    ) -> tuple[Float64[np.ndarray, " lattices"], Float64[np.ndarray, " cells"]]:
        """Return expected numbers of right frames by lattice, and their sum's gradient by score.

        The gradient is acoustic_scale * gamma (c_arc - c_avg), summed over the arcs of a cell.
        """
        acoustic = np.append(scores, 0.0)[self.arc_cells]
        log_weights = self.log_weights + self.acoustic_scale * acoustic
        found = forward_backward(self.lattices, log_weights, self.accuracies)
        average = found.accuracies[self.lattices.arc_lattices]
        by_arc = self.acoustic_scale * found.posteriors * (found.arc_accuracies - average)
        gradient = np.bincount(self.arc_cells, by_arc, minlength=len(scores) + 1)
        return found.accuracies, gradient[:-1]


def _arc_columns(row: int, utterance: AlignedLattice) -> Int64[np.ndarray, "4 arcs"]:
    """Return each arc's row, frame, senone (-1 for none), and 1 if that is the reference's."""
    lattice = utterance.lattice
    frames = np.repeat(lattice.level_frames, lattice.level_sizes)[lattice.sources]
    senones = lattice.labels.astype(np.int64) - 1
    # At the end's frame there is no reference, and no arc that reads a frame.
    correct = (senones >= 0) & (senones == np.append(utterance.reference, -1)[frames])
    return np.stack([np.full(len(senones), row), frames, senones, correct.astype(np.int64)])


def smbr_loss(
    logits: Float[Tensor, "batch outputs senones"], batch: SmbrBatch
) -> Float64[Tensor, ""]:
    """Return minus the expected accuracy, summed over the utterances, to differentiate.

    The arithmetic is the host's, in float64, so a device's step waits here for its logits.
    """
    row, output, senone = torch.from_numpy(batch.cells).to(logits.device)
    total: Tensor = _ExpectedAccuracy.apply(logits[row, output, senone], batch)  # type: ignore[no-untyped-call]
    return -total


class _ExpectedAccuracy(torch.autograd.Function):
    """_ExpectedAccuracy is the sum over lattices; its gradient comes from forward-backward."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, batch: SmbrBatch) -> Tensor:  # noqa: ANN401
        accuracies, gradient = batch.expected_accuracies(scores.detach().double().cpu().numpy())
        ctx.save_for_backward(torch.from_numpy(gradient).to(scores))
        return torch.tensor(accuracies.sum(), dtype=torch.float64, device=scores.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return output_gradient.to(gradient.dtype) * gradient, None
