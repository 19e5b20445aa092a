"""State posteriors of a lattice: how probable each senone is at each frame, over all its paths."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64
from scipy.special import softmax

from pipeline.kbest import KBest, select_kbest
from pipeline.shards import Lattice
from training.sequence_training.forward_backward import LatticeBatch, forward_backward

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
