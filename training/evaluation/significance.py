"""Compare two models on the same speakers: the gain, its interval, and a matched-pairs test.

MAPSSWE takes segments of an utterance as independent, and their differences as normal. One voice
makes the same error in many segments, so here a pair is a speaker, and nothing is assumed normal.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from training.evaluation.speaker_bootstrap import Estimate, Resamples


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison: what a system gains on a baseline, and how sure that is.

    `p_value` is of the exact permutation test over speakers, two-sided; `share_without_gain` is of
    the paired bootstrap, one-sided.
    """

    reduction: Estimate
    p_value: float
    share_without_gain: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "reduction": self.reduction.to_json()}


def compare(drawn: Resamples, baseline: str, system: str) -> Comparison:
    """Compare two models on the same speakers; ValueError if the baseline has no errors."""
    errors = drawn.counts.errors
    return Comparison(
        drawn.reduction(baseline, system),
        permutation_p_value(errors[baseline] - errors[system]),
        drawn.share_without_gain(baseline, system),
    )


def permutation_p_value(differences: Int64[np.ndarray, " speakers"]) -> float:
    """Return the two-sided p-value of the sum of the speakers' differences in errors.

    If the models are equally good, each speaker's difference d could as well be -d. The p-value is
    the share of all 2^n choices of signs whose sum is as far from 0 as the observed one, or
    farther. It is exact: no signs are drawn.
    """
    sizes, repeats = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    reach = int(sizes @ repeats)
    # A sum of independent +-d has the characteristic function prod cos(d t). The sum is between
    # -reach and reach, so as many points t invert it exactly.
    num_points = 2 * reach + 1
    angles = 2 * np.pi * np.arange(num_points) / num_points
    characteristic = np.ones(num_points)
    for size, repeat in zip(sizes, repeats, strict=True):
        characteristic *= np.cos(size * angles) ** repeat
    probabilities = np.fft.fft(characteristic).real / num_points
    sums = np.fft.fftfreq(num_points, 1 / num_points)
    # Less half a unit, as sums are integers that a float may miss by its last bits.
    is_as_far = np.abs(sums) > abs(int(differences.sum())) - 0.5
    return float(np.clip(probabilities[is_as_far].sum(), 0, 1))
