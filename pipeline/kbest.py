"""The k highest logits of each frame, and how much probability they keep (paper 003 V-C)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float16, Float32, Int64, UInt16

from pipeline.settings import MAX_SENONES, require_below_k
from pipeline.tail_samples import draw_tail

TAIL_TOLERANCE = 0.01
"""How far from 1 the stored weights of a frame may sum: log Z and logits up to 16 have 11 bits."""

LOWEST = float(np.finfo(np.float16).min)
"""The logit of a senone without probability: its exponential is 0, and the store can hold it."""


@dataclass(frozen=True, slots=True, eq=False)
class KBest:
    """A teacher's k best senones per low-rate frame, best first, ties by lower senone.

    `logits` and `log_z` (log of the sum of exp over all senones) are relative to the frame's
    largest logit: the best is 0, so that float16 is fine where the probability is. The last
    `tail_samples` of the k columns are draws from the other senones, ascending by senone: exp of
    their logit is a weight, and softmax over all columns is right in expectation.
    """

    senones: UInt16[np.ndarray, "frames k"]
    logits: Float16[np.ndarray, "frames k"]
    log_z: Float16[np.ndarray, " frames"]
    tail_samples: int = field(default=0, kw_only=True)

    @property
    def num_best(self) -> int:
        """Count the columns of the head, which are the best senones themselves."""
        return len(self.senones.T) - self.tail_samples

    def rows(self, chosen: slice | Int64[np.ndarray, " rows"]) -> "KBest":
        """Return some rows: of a slice views, of numbers copies."""
        return replace(
            self, senones=self.senones[chosen], logits=self.logits[chosen], log_z=self.log_z[chosen]
        )


@dataclass(frozen=True, slots=True, eq=False)
class OwnKBest(KBest):
    """OwnKBest: the teacher's own k best, where others were asked for.

    `statistic` counts such utterances: those without a lattice, or without a transcript. `reason`
    says why there is none, and `detail` in a sentence.
    """

    statistic: str
    reason: str
    detail: str

    @classmethod
    def of(cls, own: KBest, statistic: str, reason: str, detail: str) -> "OwnKBest":
        """Say why these targets are the teacher's own."""
        columns = own.senones, own.logits, own.log_z
        return cls(*columns, statistic, reason, detail, tail_samples=own.tail_samples)


@dataclass(frozen=True, slots=True, eq=False)
class KBestOfTranscript(KBest):
    """KBestOfTranscript: the share of its targets that is the transcript's, all frames together."""

    transcript_share: float


@dataclass(frozen=True, slots=True)
class TeacherFailure:
    """TeacherFailure: why a teacher has no targets for an utterance, though it was alone."""

    reason: str


def joined(parts: Sequence[KBest]) -> KBest:
    """Join the targets of an utterance's successive parts."""
    return replace(
        parts[0],
        senones=np.concatenate([each.senones for each in parts]),
        logits=np.concatenate([each.logits for each in parts]),
        log_z=np.concatenate([each.log_z for each in parts]),
    )


def select_kbest(
    logits: Float32[np.ndarray, "frames senones"], k: int, tail_samples: int = 0, seed: int = 0
) -> KBest:
    """Keep the `k` largest of each frame's `logits` and the log Z of all of them.

    Logits are of a teacher, or log of an ensemble's mean posteriors, up to a constant a frame. With
    `tail_samples`, so many of the k are draws of `seed`, 64 bits, from the senones that are not
    among the k - `tail_samples` best: equal logits and an equal seed give equal bytes.
    """
    num_senones = logits.shape[1]
    if not 1 <= k <= num_senones:
        raise ValueError(f"k = {k}: need 1..{num_senones}, the teacher's senones")
    require_below_k(tail_samples, k)
    if num_senones > MAX_SENONES:
        raise ValueError(f"{num_senones} senones: need at most {MAX_SENONES}, ids are 16 bits")
    if not np.isfinite(logits).all():
        raise ValueError("logits hold NaN or infinity: the teacher has diverged")
    senones = _best_senones(logits, k - tail_samples)
    kept = np.take_along_axis(logits, senones, axis=1)
    largest = kept[:, :1]
    weights = np.exp(logits - largest)
    log_z = np.log(weights.sum(axis=1)).astype(np.float16)
    relative = np.maximum(kept - largest, LOWEST).astype(np.float16)
    best = KBest(senones.astype(np.uint16), relative, log_z)
    if not tail_samples:
        return best
    tail = draw_tail(weights, senones, tail_samples, seed)
    with np.errstate(divide="ignore"):
        of_tail = np.maximum(np.log(tail.weights), LOWEST).astype(np.float16)
    return KBest(
        np.concatenate([best.senones, tail.senones.astype(np.uint16)], axis=1),
        np.concatenate([best.logits, of_tail], axis=1),
        best.log_z,
        tail_samples=tail_samples,
    )


def _best_senones(
    logits: Float32[np.ndarray, "frames senones"], k: int
) -> Int64[np.ndarray, "frames k"]:
    # Four times as fast as one partition of (logit, senone) keys: 900 x real time at 3,183.
    kth = logits.shape[1] - k
    # The k-th place is looked at again only where it is tied, which is rare.
    threshold = np.partition(logits, kth, axis=1)[:, kth, np.newaxis]
    kept = logits >= threshold
    if np.count_nonzero(kept) > len(logits) * k:
        tied = logits == threshold
        room = k - np.count_nonzero(logits > threshold, axis=1, keepdims=True)
        kept &= ~tied | (np.cumsum(tied, axis=1) <= room)
    senones = np.flatnonzero(kept).reshape(-1, k) % logits.shape[1]
    falling = np.argsort(-np.take_along_axis(logits, senones, axis=1), axis=1, kind="stable")
    return np.take_along_axis(senones, falling, axis=1)


def best_probabilities(kbest: KBest) -> Float32[np.ndarray, "frames best"]:
    """Return the teacher's probabilities of the head's senones, not renormalized."""
    best = kbest.logits[:, : kbest.num_best].astype(np.float32)
    shares: Float32[np.ndarray, "frames best"] = np.exp(
        best - kbest.log_z.astype(np.float32)[:, np.newaxis]
    )
    return shares


def retained_mass(kbest: KBest) -> Float32[np.ndarray, " frames"]:
    """Sum, frame by frame, the teacher's probability that the head's k best hold."""
    # float16 rounds log Z by up to 0.2 %, which can lift a full frame above 1.
    mass: Float32[np.ndarray, " frames"] = np.minimum(
        best_probabilities(kbest).sum(axis=1), np.float32(1)
    )
    return mass


def soft_targets(kbest: KBest) -> Float32[np.ndarray, "frames k"]:
    """Softmax over the stored columns, as if the missing logits were -infinity."""
    weights: Float32[np.ndarray, "frames k"] = np.exp(kbest.logits.astype(np.float32))
    # Large negative logits elsewhere (003 V-C) renormalize: at retained mass a, t becomes t / a.
    # With a drawn tail the columns' weights sum to one by themselves.
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def check_kbest(kbest: KBest, where: str) -> None:
    """Refuse targets that `select_kbest` cannot have written; `where` names them."""
    best = kbest.logits[:, : kbest.num_best]
    if best.shape[1] and not (best[:, 0] == 0).all():
        raise ValueError(f"{where}: the best logit of every frame must be 0")
    if not (best[:, 1:] <= best[:, :-1]).all() or not np.isfinite(kbest.logits).all():
        raise ValueError(f"{where}: logits must be finite and fall from best to worst")
    if not (np.isfinite(kbest.log_z).all() and (kbest.log_z >= 0).all()):
        raise ValueError(f"{where}: log Z must be finite and not below the best logit, 0")
    if kbest.tail_samples:
        _check_tail(kbest, where)


def _check_tail(kbest: KBest, where: str) -> None:
    best, tail = np.split(kbest.senones, [kbest.num_best], axis=1)
    is_weighted = kbest.logits[:, kbest.num_best :] > LOWEST
    rises = tail[:, 1:] > tail[:, :-1]
    # A draw that repeats another is merged into it, and its own column has no weight.
    if not (rises | ((tail[:, 1:] == tail[:, :-1]) & ~is_weighted[:, 1:])).all():
        raise ValueError(f"{where}: the tail's senones must rise, and repeats have no weight")
    if ((tail[:, :, np.newaxis] == best[:, np.newaxis]).any(axis=2) & is_weighted).any():
        raise ValueError(f"{where}: a senone of the tail is among the best, too")
    sums = np.exp(kbest.logits.astype(np.float32)).sum(axis=1)
    shares = sums / np.exp(kbest.log_z.astype(np.float32))
    if not (np.abs(shares - 1) <= TAIL_TOLERANCE).all():
        raise ValueError(
            f"{where}: weights sum to {shares.min():.4f}..{shares.max():.4f}: need 1 within "
            f"{TAIL_TOLERANCE}, as they include the tail's"
        )
