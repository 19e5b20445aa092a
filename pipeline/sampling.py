"""Uniform selection to an hours budget, with mild oversampling (paper 003 IV-B1)."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, UInt64

NUM_PRIORITIES = 2**64
# Chance of drawing too little: about 1e-9.
_SAFETY_DEVIATIONS = 6.0


def sampling_priority(seed: int, utterance_id: str) -> int:
    """Hash an utterance to 64 bits: a uniform draw that no order or partition can change."""
    key = seed.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(utterance_id.encode(), digest_size=8, key=key)
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class DurationStatistics:
    """Count, sum and sum of squares of durations: exact integers, so partitions add up."""

    num_utterances: int = 0
    total_ms: int = 0
    total_squared_ms2: int = 0

    @classmethod
    def of(cls, durations_ms: Int64[np.ndarray, " utterances"]) -> "DurationStatistics":
        """Count `durations_ms`."""
        durations = durations_ms.tolist()
        return cls(len(durations), sum(durations), sum(each * each for each in durations))

    def __add__(self, other: "DurationStatistics") -> "DurationStatistics":
        return DurationStatistics(
            self.num_utterances + other.num_utterances,
            self.total_ms + other.total_ms,
            self.total_squared_ms2 + other.total_squared_ms2,
        )


def oversampling_threshold(statistics: DurationStatistics, budget_ms: int) -> int:
    """Bound the priorities worth collecting: those below it exceed the budget, mildly.

    Taking each utterance with probability p draws pT ms, with a variance of p(1 - p) times the
    sum of squares; p is the least that leaves the budget six deviations below the mean.
    """
    _require_budget(budget_ms)
    total, budget = statistics.total_ms, budget_ms
    if budget == 0 or budget >= total:
        return NUM_PRIORITIES
    spread = _SAFETY_DEVIATIONS**2 * statistics.total_squared_ms2
    # The larger root of (pT - B)^2 = spread * p (1 - p).
    half_b, a = budget * total + spread / 2, total**2 + spread
    p = (half_b + math.sqrt(half_b**2 - a * budget**2)) / a
    return min(NUM_PRIORITIES, math.ceil(p * NUM_PRIORITIES))


def select_to_budget(
    priorities: UInt64[np.ndarray, " utterances"],
    durations_ms: Int64[np.ndarray, " utterances"],
    budget_ms: int,
) -> Bool[np.ndarray, " utterances"]:
    """Take utterances by rising priority until the budget is met; 0 takes all.

    The total exceeds the budget by less than the last utterance taken. ValueError if all of
    them together fall short.
    """
    _require_budget(budget_ms)
    total_ms = int(durations_ms.sum())
    if budget_ms > total_ms:
        hours, budget_hours = total_ms / 3.6e6, budget_ms / 3.6e6
        raise ValueError(
            f"budget = {budget_hours:.2f} h: need at most {hours:.2f} h, what there is to select "
            "from; 0 takes all"
        )
    if budget_ms == 0:
        return np.ones(len(priorities), dtype=np.bool_)
    order = np.argsort(priorities)
    totals_ms = np.cumsum(durations_ms[order])
    last = order[np.searchsorted(totals_ms, budget_ms)]
    # Equal priorities stay together, or the order of the input would show.
    chosen: Bool[np.ndarray, " utterances"] = priorities <= priorities[last]
    return chosen


def _require_budget(budget_ms: int) -> None:
    if budget_ms < 0:
        raise ValueError(f"budget = {budget_ms / 3.6e6:.2f} h: need 0 (all) or more")
