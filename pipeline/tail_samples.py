"""Draws from the senones beyond the best: few of them stand for the whole tail, without bias.

Anshumann et al. 2025 (arXiv 2503.16870) measure the bias of renormalized k-best targets. Here each
senone of the tail has its own probability in expectation, by `tail_samples` draws a frame.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

_BLOCK = 64
"""Senones of which the weights are added up at once, about the root of the papers' 3,183."""

_BELOW_ONE = 1 - 2.0**-53


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """Tail: drawn senones in rising order, and the weight of each, relative to the best senone's.

    A repeat's weight is added to the first column of its senone, and is 0 in its own. A frame
    without a tail has senone 0, of weight 0.
    """

    senones: Int64[np.ndarray, "frames draws"]
    weights: Float64[np.ndarray, "frames draws"]


def draw_tail(
    weights: Float32[np.ndarray, "frames senones"],
    best: Int64[np.ndarray, "frames best"],
    num_draws: int,
    seed: int,
) -> Tail:
    """Draw with replacement from the senones that are not among the `best`, by their `weights`.

    Each draw has an equal share of the tail's weight. Where as many senones as draws are left,
    each is kept with its own weight.
    """
    num_frames, num_senones = weights.shape
    if best.shape[1] + num_draws == num_senones:
        return _whole_tail(weights, best)
    uniforms = np.random.Generator(np.random.Philox(key=seed)).random((num_frames, num_draws))
    blocks = _in_blocks(weights, best)
    ends = blocks.sum(axis=2, dtype=np.float64).cumsum(axis=1)
    drawn = np.sort(_inverse(blocks, ends, uniforms), axis=1)
    is_first = np.ones_like(drawn, np.bool_)
    is_first[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    num_repeats = np.count_nonzero(drawn[:, :, np.newaxis] == drawn[:, np.newaxis], axis=2)
    return Tail(drawn, num_repeats * is_first * (ends[:, -1:] / num_draws))


def _whole_tail(
    weights: Float32[np.ndarray, "frames senones"], best: Int64[np.ndarray, "frames best"]
) -> Tail:
    is_left: Bool[np.ndarray, "frames senones"] = np.ones_like(weights, np.bool_)
    np.put_along_axis(is_left, best, False, axis=1)
    num_left = weights.shape[1] - best.shape[1]
    senones = np.flatnonzero(is_left).reshape(-1, num_left) % weights.shape[1]
    return Tail(senones, np.take_along_axis(weights, senones, axis=1).astype(np.float64))


def _in_blocks(
    weights: Float32[np.ndarray, "frames senones"], best: Int64[np.ndarray, "frames best"]
) -> Float32[np.ndarray, "frames blocks block"]:
    """Return the weights without those of the best, and zeros up to a whole block."""
    num_frames, num_senones = weights.shape
    num_blocks = -(-num_senones // _BLOCK)
    padded = np.zeros((num_frames, num_blocks * _BLOCK), np.float32)
    padded[:, :num_senones] = weights
    np.put_along_axis(padded, best, np.float32(0), axis=1)
    return padded.reshape(num_frames, num_blocks, _BLOCK)


def _inverse(
    blocks: Float32[np.ndarray, "frames blocks block"],
    ends: Float64[np.ndarray, "frames blocks"],
    uniforms: Float64[np.ndarray, "frames draws"],
) -> Int64[np.ndarray, "frames draws"]:
    """Invert the cumulative distribution: find the block of each draw, then the senone in it."""
    # A cumulative sum of all senones takes six times as long as the sums of blocks.
    points = uniforms * ends[:, -1:]
    numbers = np.count_nonzero(ends[:, np.newaxis] <= points[:, :, np.newaxis], axis=2)
    is_empty = ends[:, -1:] == 0
    numbers[np.broadcast_to(is_empty, numbers.shape)] = 0
    sums = np.diff(ends, axis=1, prepend=0)
    first = np.take_along_axis(ends - sums, numbers, axis=1)
    mass = np.take_along_axis(sums, numbers, axis=1)
    inside = np.take_along_axis(blocks, numbers[:, :, np.newaxis], axis=1)
    within = inside.cumsum(axis=2, dtype=np.float64)
    # Sums in another order round otherwise: shares of the block's own sum stay within it.
    shares = np.clip((points - first) / np.where(is_empty, 1, mass), 0, _BELOW_ONE)
    places = np.count_nonzero(within <= shares[:, :, np.newaxis] * within[:, :, -1:], axis=2)
    found: Int64[np.ndarray, "frames draws"] = np.where(is_empty, 0, _BLOCK * numbers + places)
    return found
