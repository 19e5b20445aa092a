"""Grow the phonetic decision tree: the split that gains most likelihood comes first.

Likelihoods are those of diagonal Gaussians, from counts, sums and sums of squares of aligned
cepstra.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int, Int32

from training.align.monophone_hmm import VARIANCE_FLOOR
from training.array_encoding import decode_arrays, encode_arrays
from training.decode.lexicon import SILENCE_ID
from training.decode.senones import Node, PhoneAlignment, SenoneTree, Side, Split
from training.settings.decoding import TreeConfig


@dataclass(frozen=True)
class GaussianStatistics:
    """GaussianStatistics holds the statistics of several sets of frames, one row for each set."""

    counts: Float64[np.ndarray, " sets"]
    sums: Float64[np.ndarray, "sets dimension"]
    squares: Float64[np.ndarray, "sets dimension"]

    def __len__(self) -> int:
        return len(self.counts)

    def select(
        self, rows: Int[np.ndarray, " chosen"] | Bool[np.ndarray, " sets"]
    ) -> "GaussianStatistics":
        """Return the statistics of some of the sets."""
        return GaussianStatistics(self.counts[rows], self.sums[rows], self.squares[rows])

    def pool(self, weights: Float[np.ndarray, "pooled sets"]) -> "GaussianStatistics":
        """Merge sets: row i of `weights` is 1 for the sets of merged set i, else 0."""
        return GaussianStatistics(
            weights @ self.counts, weights @ self.sums, weights @ self.squares
        )

    def log_likelihoods(self) -> Float64[np.ndarray, " sets"]:
        """Return each set's log-likelihood under its own Gaussian, without terms in counts alone.

        That is -n/2 sum_d (log var_d + 1) for n frames.
        """
        counts = np.maximum(self.counts, 1e-9)[:, np.newaxis]
        variances = self.squares / counts - (self.sums / counts) ** 2
        log_variances = np.log(np.maximum(variances, VARIANCE_FLOOR))
        totals: Float64[np.ndarray, " sets"] = (log_variances + 1).sum(axis=1)
        totals *= -0.5 * self.counts
        return totals


@dataclass(frozen=True)
class TriphoneStatistics:
    """TriphoneStatistics holds the statistics of each triphone, sorted, that occurs in some speech.

    Those of parts add up to those of the whole, but for the last bits of double precision.
    """

    triphones: Int32[np.ndarray, "sets 3"]
    gaussians: GaussianStatistics

    def __len__(self) -> int:
        return len(self.triphones)

    def __add__(self, other: "TriphoneStatistics") -> "TriphoneStatistics":
        if not len(self) or not len(other):
            return self if len(self) else other
        joined = np.concatenate([self.triphones, other.triphones])
        triphones, inverse = np.unique(joined, axis=0, return_inverse=True)
        rows = np.split(inverse.reshape(-1), [len(self)])  # NumPy 2.0.0 returns a column
        totals = []
        for name in ("counts", "sums", "squares"):
            parts = [getattr(each.gaussians, name) for each in (self, other)]
            total = np.zeros((len(triphones), *parts[0].shape[1:]))
            for own, part in zip(rows, parts, strict=True):
                total[own] += part
            totals.append(total)
        return TriphoneStatistics(triphones, GaussianStatistics(*totals))

    def to_bytes(self) -> bytes:
        """Write the statistics: 650 bytes a triphone of 39 dimensions."""
        arrays = {"triphones": self.triphones, **vars(self.gaussians)}
        return encode_arrays(arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> "TriphoneStatistics":
        """Read what `to_bytes` wrote."""
        arrays = decode_arrays(data)
        triphones = arrays.pop("triphones")
        return cls(triphones, GaussianStatistics(**arrays))


def triphone_statistics(
    frames: Mapping[str, Float32[np.ndarray, "_frames dimension"]],
    alignments: Mapping[str, PhoneAlignment],
) -> TriphoneStatistics:
    """Collect the statistics of aligned utterances' 10 ms frames, by utterance id."""
    if not alignments:
        nothing = GaussianStatistics(np.zeros(0), np.zeros((0, 0)), np.zeros((0, 0)))
        return TriphoneStatistics(np.zeros((0, 3), np.int32), nothing)
    names = sorted(alignments)
    segments = np.concatenate([alignments[name].triphones for name in names])
    durations = np.concatenate([alignments[name].durations for name in names]).astype(np.float64)
    # Add up the segments of equal triphones.
    triphones, inverse = np.unique(segments, axis=0, return_inverse=True)
    rows = inverse.reshape(-1)
    moments = []
    for power in (1, 2):
        of_segments = [
            np.add.reduceat(frames[name].astype(np.float64) ** power, alignments[name].starts)
            for name in names
        ]
        moments.append(np.zeros((len(triphones), of_segments[0].shape[1])))
        np.add.at(moments[-1], rows, np.concatenate(of_segments))
    gaussians = GaussianStatistics(np.bincount(rows, durations), *moments)
    return TriphoneStatistics(triphones, gaussians)


Bound = Literal["max_senones", "min_count", "contexts"]
"""The end of the growth: enough senones, leaves too small to split, or leaves of one context."""


@dataclass(frozen=True)
class GrownTree:
    """GrownTree is a tree, and which bound ended its growth."""

    tree: SenoneTree
    bound: Bound


@dataclass(frozen=True)
class _Question:
    side: Side
    phones: Bool[np.ndarray, " phones"]
    gain: float


@dataclass
class _Leaf:
    """_Leaf holds the triphones of a leaf and, once it is split, its question and branches."""

    triphones: Int32[np.ndarray, "sets 3"]
    statistics: GaussianStatistics
    question: _Question | None = None
    branches: list["_Leaf"] = field(default_factory=list)


def grow_tree(
    statistics: TriphoneStatistics, phones: tuple[str, ...], config: TreeConfig
) -> GrownTree:
    """Grow a tree over triphones from their statistics alone.

    Every phone has a root; silence and phones that never occur remain a single leaf. The tree has
    `max_senones` unless every further split would leave a side below `min_count`.
    """
    if config.max_senones < len(phones):
        raise ValueError(f"max_senones = {config.max_senones}: need {len(phones)}, one a phone")
    if not len(statistics):
        raise ValueError("no alignments: need at least one utterance to grow a tree")
    triphones, gaussians = statistics.triphones, statistics.gaussians
    # Questions come from the phones' own statistics, pooled over their contexts.
    centres = np.arange(len(phones))[:, np.newaxis] == triphones[:, 1]
    questions = phonetic_questions(gaussians.pool(centres.astype(np.float64)))
    # Silence is never split.
    roots = [_Leaf(triphones[rows], gaussians.select(rows)) for rows in centres]
    spoken = roots[:SILENCE_ID] + roots[SILENCE_ID + 1 :]
    bound = _grow(spoken, questions, config.max_senones - len(roots), config.min_count)
    numbers = count()
    return GrownTree(SenoneTree(phones, tuple(_to_node(root, numbers) for root in roots)), bound)


def phonetic_questions(statistics: GaussianStatistics) -> Bool[np.ndarray, "questions phones"]:
    """Find sets of phones that sound alike by bottom-up clustering, and ask for each of them.

    `statistics` has one row for each phone. The questions are every single phone, and every cluster
    that arises by merging the two closest clusters until two remain. The closest clusters lose the
    least log-likelihood by their merger; phones without frames merge first, at no loss.
    """
    clusters = np.eye(len(statistics))
    questions = list(clusters)
    # Of two clusters, the first comes before the second: each pair is asked for once.
    losses = np.full((len(clusters), len(clusters)), np.inf)
    for second, phone in enumerate(clusters):
        losses[:second, second] = _losses(clusters[:second], phone, statistics)
    while len(clusters) > 2:
        pair = np.array(np.unravel_index(np.argmin(losses), losses.shape))
        merged = clusters[pair].sum(axis=0)
        others = np.delete(clusters, pair, axis=0)
        # Only the pairs with the merged cluster are new.
        losses = np.pad(
            np.delete(np.delete(losses, pair, axis=0), pair, axis=1),
            ((0, 1), (0, 1)),
            constant_values=np.inf,
        )
        losses[:-1, -1] = _losses(others, merged, statistics)
        clusters = np.vstack([others, merged])
        questions.append(merged)
    return np.stack(questions).astype(bool)


def _losses(
    clusters: Float64[np.ndarray, "clusters phones"],
    other: Float64[np.ndarray, " phones"],
    statistics: GaussianStatistics,
) -> Float64[np.ndarray, " clusters"]:
    """Return the log-likelihood that each cluster loses by its merger with another one."""
    apart = statistics.pool(clusters).log_likelihoods()
    alone = statistics.pool(other[np.newaxis]).log_likelihoods()
    lost: Float64[np.ndarray, " clusters"] = (
        apart + alone - statistics.pool(clusters + other).log_likelihoods()
    )
    return lost


def _grow(
    leaves: list[_Leaf],
    questions: Bool[np.ndarray, "questions phones"],
    num_splits: int,
    min_count: int,
) -> Bound:
    serial = count()  # of equal gains, the older leaf is split first
    candidates: list[tuple[float, int, _Leaf, _Question]] = []

    def consider(leaf: _Leaf) -> None:
        best = _best_question(leaf, questions, min_count)
        if best is not None:
            heapq.heappush(candidates, (-best.gain, next(serial), leaf, best))

    for leaf in leaves:
        consider(leaf)
    # Greedy: always split the leaf whose best question gains most, wherever it is in the forest.
    for _ in range(num_splits):
        if not candidates:
            return _unsplit_bound(leaves, questions)
        _, _, leaf, question = heapq.heappop(candidates)
        inside = question.phones[_neighbours(leaf.triphones, question.side)]
        leaf.question = question
        for rows in (inside, ~inside):
            leaf.branches.append(_Leaf(leaf.triphones[rows], leaf.statistics.select(rows)))
            consider(leaf.branches[-1])
    return "max_senones"


def _unsplit_bound(
    leaves: Sequence[_Leaf], questions: Bool[np.ndarray, "questions phones"]
) -> Bound:
    """Say why no leaf can be split: smaller sides would do for some, or no question divides any."""
    pending = list(leaves)
    while pending:
        leaf = pending.pop()
        if leaf.branches:
            pending += leaf.branches
        elif _best_question(leaf, questions, min_count=1) is not None:
            return "min_count"
    return "contexts"


def _best_question(
    leaf: _Leaf, questions: Bool[np.ndarray, "questions phones"], min_count: int
) -> _Question | None:
    best: _Question | None = None
    whole = leaf.statistics.pool(np.ones((1, len(leaf.statistics)))).log_likelihoods()
    sides: tuple[Side, Side] = ("left", "right")
    for side in sides:
        # Pooling by a 0-1 matrix scores all questions of a side in one product.
        members = questions[:, _neighbours(leaf.triphones, side)].astype(np.float64)
        inside, outside = leaf.statistics.pool(members), leaf.statistics.pool(1 - members)
        # Young, Odell and Woodland's criterion: two Gaussians' log-likelihood less one's.
        gains = inside.log_likelihoods() + outside.log_likelihoods() - whole
        gains[np.minimum(inside.counts, outside.counts) < min_count] = -np.inf
        winner = int(np.argmax(gains))
        if gains[winner] > (best.gain if best else 0.0):
            best = _Question(side, questions[winner], float(gains[winner]))
    return best


def _neighbours(triphones: Int32[np.ndarray, "sets 3"], side: Side) -> Int32[np.ndarray, " sets"]:
    return triphones[:, 0 if side == "left" else 2]


def _to_node(leaf: _Leaf, numbers: "count[int]") -> Node:
    if leaf.question is None:
        return next(numbers)
    inside, outside = (_to_node(branch, numbers) for branch in leaf.branches)
    phones = frozenset(np.flatnonzero(leaf.question.phones).tolist())
    return Split(leaf.question.side, phones, inside, outside)
