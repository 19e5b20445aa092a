"""Forward-backward over lattices: posteriors and expected accuracies of arcs, of senones.

Pure NumPy in float64. All lattices of a minibatch run side by side, level by level, so that the
longest one decides how many levels there are. State posteriors say how probable each senone is at
each frame, over all paths of a lattice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64
from scipy.special import softmax

from pipeline.kbest import LOWEST, KBest, select_kbest
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
    found = []
    for arcs in np.split(order, bounds):
        is_first = np.diff(states[arcs], prepend=-1) > 0
        firsts = np.flatnonzero(is_first)
        places = np.cumsum(is_first) - 1
        found.append(Level(arcs, others[arcs], places, states[arcs][firsts], firsts))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Expectations:
    """Expectations of a lattice's paths, by lattice and by arc.

    A path's probability is proportional to exp(sum of its arcs' log weights). `accuracies` are
    expected sums along a path, `arc_accuracies` those of the paths through an arc.
    """

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
    return Expectations(expected, posteriors, through)


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
    weight: float | Float64[np.ndarray, " frames"],
    k: int,
    tail_samples: int = 0,
    seed: int = 0,
) -> KBest:
    """Keep the k best log posteriors of (1 - weight) softmax(logits) + weight lattice posteriors.

    The weight is one for all frames, or each frame's. Where it is 0 these are the logits' own k
    best, to the bit. Where fewer than k senones have a probability, the others kept have a logit
    whose exponential is 0: the student's loss gives them no mass, as it gives none to senones that
    are not kept. The tail's draws, if any, are from the mixed posteriors.
    """
    weights = np.broadcast_to(np.asarray(weight, np.float64), len(logits))
    if not weights.any():
        return select_kbest(logits, k, tail_samples, seed)
    mixed = (1 - weights)[:, np.newaxis] * softmax(logits.astype(np.float64), axis=1)
    mixed[lattice.frames, lattice.senones] += weights[lattice.frames] * lattice.probabilities
    with np.errstate(divide="ignore"):
        log_posteriors = np.log(mixed)
    mixed_logits = np.maximum(log_posteriors, LOWEST).astype(np.float32)
    is_own = weights == 0
    mixed_logits[is_own] = logits[is_own]
    return select_kbest(mixed_logits, k, tail_samples, seed)
