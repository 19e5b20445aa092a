"""Costs of storing k columns a frame: in probability, agreement, calibration and gradients.

The bias of renormalized k-best targets is that of arXiv 2503.16870; 003 V-C keeps k = 20 without a
figure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from scipy.special import softmax

from pipeline.kbest import select_kbest, soft_targets

Form: TypeAlias = Literal["renormalized", "ghost", "sampled"]
"""Renormalized to one; with one class of all others; or with a fifth of the columns drawn."""

FORMS: tuple[Form, ...] = ("renormalized", "ghost", "sampled")

KS = (1, 5, 10, 20, 40)

Frames: TypeAlias = Float64[np.ndarray, " frames"]
Distributions: TypeAlias = Float64[np.ndarray, "frames senones"]


@dataclass(frozen=True, slots=True, eq=False)
class KBestCosts:
    """KBestCosts: the costs of k columns, frame by frame.

    `mass` is the teacher's probability of its k best; `agrees` whether the student's best senone
    is among them. By form, `errors` is the distance from the teacher's best probability of that
    which fits the targets; `angles` is between the gradient by the student's logits and the full
    one, p - t, in degrees.
    """

    mass: Frames
    agrees: Bool[np.ndarray, " frames"]
    errors: Mapping[Form, Frames]
    angles: Mapping[Form, Frames]


def num_drawn(k: int) -> int:
    """Return how many of k columns are drawn in the sampled form: 4 of 20, none of 1."""
    return min(max(k // 5, 1), k - 1)


def kbest_costs(
    teacher: Float32[np.ndarray, "frames senones"],
    student: Float32[np.ndarray, "frames senones"],
    k: int,
    seed: int,
) -> KBestCosts:
    """Return the costs of k columns, of logits of both; `seed` draws the sampled form's tail."""
    t, p = softmax(teacher.astype(np.float64), axis=1), softmax(student.astype(np.float64), axis=1)
    best = np.argsort(-t, axis=1, kind="stable")[:, :k]
    kept = np.zeros_like(t)
    np.put_along_axis(kept, best, np.take_along_axis(t, best, axis=1), axis=1)
    mass = kept.sum(axis=1)
    fitted: Mapping[Form, Callable[[], Distributions]] = {
        "renormalized": lambda: kept / mass[:, np.newaxis],
        "ghost": lambda: _with_ghost(kept, p, best),
        "sampled": lambda: _sampled(teacher, k, seed),
    }
    errors, angles = {}, {}
    # A single column is the best senone, and none is left to draw.
    for form in FORMS if num_drawn(k) else FORMS[:2]:
        target = fitted[form]()
        first = np.take_along_axis(target - t, best[:, :1], axis=1)[:, 0]
        errors[form], angles[form] = np.abs(first), _angles(p - target, p - t)
    agrees = (best == p.argmax(axis=1)[:, np.newaxis]).any(axis=1)
    return KBestCosts(mass, agrees, errors, angles)


def _with_ghost(
    kept: Distributions, p: Distributions, best: Int64[np.ndarray, "frames k"]
) -> Distributions:
    """Complete the k best by the missing mass, in the student's own shares of the others."""
    others = p.copy()
    np.put_along_axis(others, best, 0, axis=1)
    shares = others / np.maximum(others.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    completed: Distributions = kept + (1 - kept.sum(axis=1, keepdims=True)) * shares
    return completed


def _sampled(teacher: Float32[np.ndarray, "frames senones"], k: int, seed: int) -> Distributions:
    """Return the stored distribution with a drawn tail, over all senones."""
    kbest = select_kbest(teacher, k, num_drawn(k), seed)
    dense = np.zeros(teacher.shape)
    frames = np.arange(len(teacher))[:, np.newaxis]
    np.add.at(dense, (frames, kbest.senones.astype(np.int64)), soft_targets(kbest))
    return dense


def _angles(some: Distributions, full: Distributions) -> Frames:
    """Return the angles between vectors in degrees, 0 where either has no length."""
    lengths = np.linalg.norm(some, axis=1) * np.linalg.norm(full, axis=1)
    has_length = lengths > 0
    cosines = np.ones(len(some))
    np.divide((some * full).sum(axis=1), lengths, out=cosines, where=has_length)
    angles: Frames = np.degrees(np.arccos(np.clip(cosines, -1, 1)))
    return angles


class CostSums:
    """CostSums adds up frames' costs by k, as one placement's or those of all."""

    def __init__(self) -> None:
        self.num_frames = 0
        self._by_k: dict[int, dict[str, float]] = {}

    def add(self, by_k: Mapping[int, KBestCosts]) -> None:
        """Add the frames of a piece of an utterance."""
        for k, costs in by_k.items():
            sums = self._by_k.setdefault(k, {})
            for name, value in _sums(costs).items():
                sums[name] = sums.get(name, 0.0) + value
        self.num_frames += len(next(iter(by_k.values())).mass)

    def means(self) -> dict[str, object]:
        """Return the means a frame by k, as JSON holds them."""
        return {
            "num_frames": self.num_frames,
            "k": {
                str(k): {name: value / self.num_frames for name, value in sums.items()}
                for k, sums in self._by_k.items()
            },
        }


def _sums(costs: KBestCosts) -> dict[str, float]:
    sums = {"mass": float(costs.mass.sum()), "agreement": float(costs.agrees.sum())}
    for form in costs.errors:
        sums[f"calibration_error_{form}"] = float(costs.errors[form].sum())
        sums[f"angle_{form}"] = float(costs.angles[form].sum())
    return sums
