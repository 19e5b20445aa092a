"""State-level minimum Bayes risk: expected frame accuracy over lattices (paper 003 II-C).

Kingsbury 2009; Vesely et al. 2013. The expected accuracy of an utterance is
sum over paths of P(path) times the number of frames at which the path's senone is the reference's,
with P(path) proportional to exp(acoustic_scale * log p(x | path) + log p(path)).

Forward-backward gives posteriors and expected accuracies of arcs, in NumPy's float64. All lattices
of a minibatch run side by side, level by level, so that the longest one decides how many levels
there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Integer
from scipy.special import softmax
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kbest import KBest, select_kbest
from pipeline.shards import Lattice


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Level: the arcs at some states, state by state, with the states at their other ends.

    `firsts` has the position in `arcs` of each state's first arc, `places` each arc's position in
    `states`.
    """

    arcs: Int64[np.ndarray, " _arcs"]
    others: Int64[np.ndarray, " _arcs"]
    places: Int64[np.ndarray, " _arcs"]
    states: Int64[np.ndarray, " _states"]
    firsts: Int64[np.ndarray, " _states"]


@dataclass(frozen=True, slots=True, eq=False)
class LatticeBatch:
    """LatticeBatch joins lattices without connecting them; arcs and states are counted over all.

    `entering` has the levels in order, each with the arcs into its states; `leaving` has them in
    reverse, each with the arcs out of its states. `arc_lattices` has each arc's lattice.
    """

    entering: tuple[Level, ...]
    leaving: tuple[Level, ...]
    sources: Int64[np.ndarray, " arcs"]
    targets: Int64[np.ndarray, " arcs"]
    arc_lattices: Int64[np.ndarray, " arcs"]
    starts: Int64[np.ndarray, " lattices"]
    ends: Int64[np.ndarray, " lattices"]

    @classmethod
    def of(cls, lattices: Sequence[Lattice]) -> "LatticeBatch":
        """Join one lattice or more."""
        counts = np.array([lattice.num_states for lattice in lattices])
        starts = np.cumsum(counts) - counts
        pairs = list(zip(lattices, starts, strict=True))
        sources = np.concatenate([each.sources + start for each, start in pairs])
        targets = np.concatenate([each.targets + start for each, start in pairs])
        levels = np.concatenate([lattice.state_levels for lattice in lattices])
        num_arcs = [len(lattice.sources) for lattice in lattices]
        return cls(
            entering=_levels(levels, targets, sources),
            leaving=_levels(levels, sources, targets)[::-1],
            sources=sources,
            targets=targets,
            arc_lattices=np.repeat(np.arange(len(lattices)), num_arcs),
            starts=starts,
            ends=starts + counts - 1,
        )


def _levels(
    levels: Int64[np.ndarray, " states"],
    states: Int64[np.ndarray, " arcs"],
    others: Int64[np.ndarray, " arcs"],
) -> tuple[Level, ...]:
    """Group the arcs by the levels of their `states`, in ascending order, and then by state."""
    order = np.lexsort((states, levels[states]))
    bounds = np.flatnonzero(np.diff(levels[states[order]])) + 1
    return tuple(_level(arcs, states[arcs], others[arcs]) for arcs in np.split(order, bounds))


def _level(
    arcs: Int64[np.ndarray, " _arcs"],
    states: Int64[np.ndarray, " _arcs"],
    others: Int64[np.ndarray, " _arcs"],
) -> Level:
    is_first = np.diff(states, prepend=-1) > 0
    firsts = np.flatnonzero(is_first)
    return Level(arcs, others, np.cumsum(is_first) - 1, states[firsts], firsts)


@dataclass(frozen=True, slots=True, eq=False)
class Expectations:
    """Expectations of a lattice's paths, by lattice and by arc.

    A path's probability is proportional to exp(sum of its arcs' log weights). `accuracies` are
    expected sums along a path, `arc_accuracies` those of the paths through an arc.
    """

    log_totals: Float64[np.ndarray, " lattices"]
    accuracies: Float64[np.ndarray, " lattices"]
    posteriors: Float64[np.ndarray, " arcs"]
    arc_accuracies: Float64[np.ndarray, " arcs"]


def forward_backward(
    batch: LatticeBatch,
    log_weights: Float64[np.ndarray, " arcs"],
    accuracies: Float64[np.ndarray, " arcs"],
) -> Expectations:
    """Return the posterior gamma of each arc, and expected accuracies c_avg and c (Povey 2004).

    The derivative of a lattice's expected accuracy by an arc's log weight is gamma (c - c_avg).
    """
    num_states = int(batch.ends[-1]) + 1
    alphas, alpha_accuracies = np.zeros(num_states), np.zeros(num_states)
    betas, beta_accuracies = np.zeros(num_states), np.zeros(num_states)
    _sweep(batch.entering, log_weights, accuracies, alphas, alpha_accuracies)
    _sweep(batch.leaving, log_weights, accuracies, betas, beta_accuracies)
    log_totals, expected = alphas[batch.ends], alpha_accuracies[batch.ends]
    log_paths = alphas[batch.sources] + log_weights + betas[batch.targets]
    through = alpha_accuracies[batch.sources] + accuracies + beta_accuracies[batch.targets]
    posteriors = np.exp(log_paths - log_totals[batch.arc_lattices])
    return Expectations(log_totals, expected, posteriors, through)


def _sweep(
    levels: Sequence[Level],
    log_weights: Float64[np.ndarray, " arcs"],
    accuracies: Float64[np.ndarray, " arcs"],
    totals: Float64[np.ndarray, " states"],
    means: Float64[np.ndarray, " states"],
) -> None:
    """Fill in each state's log total and mean accuracy of the paths between it and one end."""
    for level in levels:
        scores = totals[level.others] + log_weights[level.arcs]
        best = np.maximum.reduceat(scores, level.firsts)
        shares = np.exp(scores - best[level.places])
        sums = np.add.reduceat(shares, level.firsts)
        gains = shares * (means[level.others] + accuracies[level.arcs])
        totals[level.states] = best + np.log(sums)
        means[level.states] = np.add.reduceat(gains, level.firsts) / sums


_LOWEST = float(np.finfo(np.float16).min)
"""The logit of a senone without probability: its exponential is 0, and the store can hold it."""


@dataclass(frozen=True, slots=True, eq=False)
class StatePosteriors:
    """StatePosteriors: the senones that a lattice has at each frame, and their probabilities.

    Entries are in the order of frames, then senones, each pair once. A senone that no path reads
    at a frame has no entry: its posterior is 0.
    """

    frames: Int64[np.ndarray, " entries"]
    senones: Int64[np.ndarray, " entries"]
    probabilities: Float64[np.ndarray, " entries"]


def state_posteriors(
    lattice: Lattice, log_likelihoods: Float[np.ndarray, "frames senones"]
) -> StatePosteriors:
    """Sum, frame by frame, the posteriors of the arcs that read a senone; in float64.

    A path's log weight is the sum of its scaled log-likelihoods minus that of its graph costs.
    """
    assert len(log_likelihoods) == lattice.num_frames, "a score for each frame"
    # Label 0 reads no frame: such an arc has its graph cost alone.
    reads = lattice.labels > 0
    levels = lattice.state_levels[lattice.sources[reads]]
    frames = lattice.level_frames[levels].astype(np.int64)
    senones = lattice.labels[reads].astype(np.int64) - 1
    log_weights = -lattice.graph_costs.astype(np.float64)
    log_weights[reads] += log_likelihoods[frames, senones]
    no_accuracies = np.zeros(len(log_weights))
    found = forward_backward(LatticeBatch.of([lattice]), log_weights, no_accuracies)
    num_senones = log_likelihoods.shape[1]
    cells, places = np.unique(frames * num_senones + senones, return_inverse=True)
    sums = np.bincount(places, found.posteriors[reads], minlength=len(cells))
    return StatePosteriors(*np.divmod(cells, num_senones), sums)


def interpolated_kbest(
    logits: Float32[np.ndarray, "frames senones"],
    lattice: StatePosteriors,
    weight: float,
    k: int,
    tail_samples: int = 0,
    seed: int = 0,
) -> KBest:
    """Keep the k best log posteriors of (1 - weight) softmax(logits) + weight lattice posteriors.

    At weight 0 these are the logits' own k best, to the bit. Where fewer than k senones have a
    probability, the others kept have a logit whose exponential is 0: the student's loss gives them
    no mass, as it gives none to senones that are not kept. The tail's draws, if any, are from the
    mixed posteriors.
    """
    if weight == 0:
        return select_kbest(logits, k, tail_samples, seed)
    mixed = (1 - weight) * softmax(logits.astype(np.float64), axis=1)
    mixed[lattice.frames, lattice.senones] += weight * lattice.probabilities
    with np.errstate(divide="ignore"):
        log_posteriors = np.log(mixed)
    mixed_logits = np.maximum(log_posteriors, _LOWEST).astype(np.float32)
    return select_kbest(mixed_logits, k, tail_samples, seed)


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
    def of(
        cls,
        utterances: Sequence[AlignedLattice],
        delay: int,
        criterion: Smbr,
    ) -> "SmbrBatch":
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
