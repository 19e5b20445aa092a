"""Recommend a trainer for a link and a number of ranks: the fastest that is known to be accurate.

Seconds are the cost model's. Accuracies are percent relative to one rank, of the same frames and
passes. Simulated ranks were measured (`tests/benchmarks/results/trainer_accuracy.md`: frame
accuracy, medians of three seeds), or a paper prints them (relative WER reduction; 003: relative
frame accuracy). Losses grow with the ranks and with the frames that their minibatches have
together, so an accuracy stands for no more of either. Beyond it is unknown.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from training.cost_model.step_time import CostModel
from training.settings.trainers import AdaGradPlace, TopK

KEPT_ACCURACY = -1.0
"""Percent of one rank's accuracy that a recommendation may lose: the spread of seeds is 0.5."""

EQUALLY_FAST = 0.9
"""Of trainers within this share of the fastest one's speed the most accurate is recommended."""

Key = tuple[str, int, int]
"""A trainer, the ranks of a group of HTM (else 1), and the steps of a block (else 0)."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy is percent relative to one rank, of ranks whose steps have so many frames."""

    percent: float
    num_ranks: int
    frames: int
    source: str


@dataclass(frozen=True, slots=True)
class Source:
    """Source holds accuracies by number of ranks, whose minibatches have so many frames each.

    With `is_of_all` the minibatches of all ranks have these frames together.
    """

    name: str
    minibatch_frames: int
    percents: Mapping[Key, Mapping[int, float]]
    is_of_all: bool = False

    def accuracies(self, key: Key) -> list[Accuracy]:
        """Return what it knows of a trainer with these groups and blocks."""
        found = self.percents.get(key, {}).items()
        frames = {n: self.minibatch_frames * (1 if self.is_of_all else n) for n, _ in found}
        return [Accuracy(percent, n, frames[n], self.name) for n, percent in found]


SIMULATED = "simulated"

SOURCES = (
    # All are relative to one rank. Larger minibatches lose accuracy, and how much is unknown.
    Source(SIMULATED, 10_000_000, {("synchronous", 1, 0): {1: 0.0}}, is_of_all=True),
    Source(
        SIMULATED,
        64,
        {
            ("gtc", 1, 0): {8: 0.2, 16: 0.4, 32: -0.5, 64: -2.0, 128: -3.3},
            ("bmuf", 1, 2): {128: -1.6},
            ("bmuf", 1, 4): {16: 0.8, 32: 1.1, 64: -0.7, 128: -3.5},
            ("bmuf", 1, 8): {8: 0.8, 16: 1.4, 32: 0.3, 64: -1.4, 128: -4.1},
            ("bmuf", 1, 16): {128: -4.1},
            ("htm", 2, 2): {128: -10.8},
            ("htm", 2, 8): {128: -4.1},
            ("htm", 4, 2): {128: -1.3},
            ("htm", 4, 8): {128: -2.3},
            ("htm", 8, 2): {128: -71.6},
            ("htm", 8, 4): {16: -0.1, 32: 0.6, 64: 0.6, 128: 0.0},
            ("htm", 8, 8): {128: -0.4},
            ("htm", 8, 16): {128: -1.6},
        },
    ),
    # A feed-forward network; an LSTM's is 0.3. With AdaGrad, at a rate that was not tuned for it,
    # both lose 2 % and more.
    Source(SIMULATED, 320, {("one_bit", 1, 0): {4: 0.1}}, is_of_all=True),
    # A feed-forward network by momentum 0.9, relative to one rank with all 1280 frames.
    Source(
        SIMULATED,
        1280,
        {
            ("d_psgd", 1, 0): {16: -2.6, 32: -5.1, 64: -10.5},
            ("ad_psgd", 1, 0): {16: -3.3, 32: -6.2, 64: -13.2},
            ("rand_psgd", 1, 0): {16: -1.5, 32: -2.4, 64: -4.0},
            ("d1d_psgd", 1, 0): {16: -13.2, 32: -12.9, 64: -13.2},
        },
        is_of_all=True,
    ),
    # Tables 1 to 3.
    Source(
        "000",
        2048,
        {
            ("gtc", 1, 0): {16: 0.4, 32: -1.4, 64: -2.8, 128: -15.6},
            ("bmuf", 1, 25): {128: -8.1},
            ("bmuf", 1, 50): {16: -0.8, 32: -3.5, 64: -8.9, 128: -9.6},
            ("bmuf", 1, 100): {128: -13.7},
            ("bmuf", 1, 200): {128: -16.6},
            ("htm", 2, 25): {128: -7.9},
            ("htm", 4, 25): {128: -5.8},
            ("htm", 8, 25): {128: -4.4},
            ("htm", 8, 50): {16: -0.5, 32: 0.1, 64: -3.2, 128: -4.7},
            ("htm", 8, 100): {128: -6.4},
            ("htm", 8, 200): {128: -7.5},
        },
    ),
    # Table I. It prints no minibatch: that of 000 is assumed.
    Source(
        "003",
        2048,
        {
            ("gtc", 1, 0): {8: 0.41, 16: 0.41, 32: 0.54, 64: 0.27},
            ("bmuf", 1, 100): {8: -0.27, 16: -0.06, 32: -0.10, 64: -0.13, 128: -2.46},
        },
    ),
    # Tables 2 and 3, relative to one rank with 256: the worse of both test sets.
    Source(
        "001",
        8192,
        {
            ("ad_psgd", 1, 0): {16: -1.5, 32: -5.3, 64: -8.0},
            ("rand_psgd", 1, 0): {16: -1.3, 32: -3.1, 64: -4.0},
            ("d1d_psgd", 1, 0): {16: -2.3, 32: -1.3, 64: -2.3, 96: -2.7, 128: -2.7},
        },
        is_of_all=True,
    ),
    # Table 2: the worst of three networks. It prints no minibatch: section 2's is assumed.
    Source("004", 1024, {("one_bit", 1, 0): {4: -0.6}}, is_of_all=True),
)

TOP_K = TopK(density=0.1)
"""What both coded trainers sent in the race at 20 Mbit/s, tests/benchmarks/results/slow_link.md.

It measured seconds to a loss. BMUF by host was first there and at 5 Mbit/s; SparseLoCo's own 3 %
did not reach the loss.
"""

BY_HOST = "bmuf by host, top_k"

KEYS = (
    *dict.fromkeys(key for source in SOURCES for key in source.percents),
    ("sparse_loco", 1, 25),
    (BY_HOST, 1, 50),
)

SETTINGS: Mapping[str, Mapping[str, int | str]] = {
    "one_bit": {"adagrad.place": AdaGradPlace.NOWHERE.value, "double_buffering": True}
}
"""Settings of the accuracies, as recipes name them, that are neither a group nor a block."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate is a trainer with its settings, its speed-up, and its accuracies as far as known.

    `unknown` says from where on both are not.
    """

    trainer: str
    settings: Mapping[str, int | str]
    speed_up: float
    simulated: Accuracy | None
    printed: Accuracy | None
    unknown: str

    @property
    def name(self) -> str:
        """Name the trainer and its settings, as TOML writes them."""
        parts = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items()]
        return ", ".join([self.trainer, *parts])

    @property
    def percent(self) -> float:
        """Return the worse accuracy relative to one rank, -inf where both are unknown."""
        known = (each.percent for each in (self.simulated, self.printed) if each)
        return min(known, default=-inf)

    @property
    def is_accurate(self) -> bool:
        """Return whether it is known to keep one rank's accuracy."""
        return self.percent >= KEPT_ACCURACY


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommendation is the recommended trainer, and all candidates from the fastest on.

    Where no accuracy is known, nothing is recommended.
    """

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]

    def verdict(self, candidate: Candidate) -> str:
        """Say how a candidate whose accuracy is known compares with the recommended one."""
        if self.chosen is None or candidate.unknown:
            return ""
        if candidate == self.chosen:
            return "recommended"
        if not candidate.is_accurate:  # of more ranks, the accuracy is but a bound
            return f"may lose > {-KEPT_ACCURACY:g} %"
        speed = candidate.speed_up / self.chosen.speed_up
        return f"{speed:.2f} as fast" if speed < EQUALLY_FAST else "less accurate"


def recommend(model: CostModel, num_ranks: int) -> Recommendation:
    """Recommend the most accurate of the fastest that keep the accuracy, or else what loses least.

    Of settings whose accuracy is unknown only the fastest of each trainer is a candidate.
    """
    ranks_per_host = model.calibration.network.ranks_per_host
    found = list[Candidate]()
    for key in KEYS if num_ranks > 1 else KEYS[:1]:
        group_size = key[1]
        # One group of all ranks is GTC. No results are known of groups that span hosts.
        divides = num_ranks % group_size == ranks_per_host % group_size == 0
        if group_size == 1 or (divides and group_size < num_ranks):
            found.append(_candidate(model, num_ranks, key))
    found.sort(key=lambda each: -each.speed_up)
    fastest = {each.trainer: each for each in reversed(found) if each.unknown}
    found = [each for each in found if not each.unknown or each == fastest[each.trainer]]
    known = [each for each in found if not each.unknown]
    kept = [each for each in known if each.is_accurate]
    fast = [each for each in kept if each.speed_up >= EQUALLY_FAST * kept[0].speed_up]
    chosen = max(fast or known, key=lambda each: each.percent, default=None)
    return Recommendation(chosen, tuple(found))


def _candidate(model: CostModel, num_ranks: int, key: Key) -> Candidate:
    trainer, group_size, block_size = key
    settings = {"group_size": group_size} if group_size > 1 else {}
    settings |= {"block_size": block_size} if block_size else {}
    frames = num_ranks * model.workload.minibatch_frames
    known = [each for source in SOURCES for each in source.accuracies(key)]
    of_ranks = [each for each in known if each.num_ranks >= num_ranks]
    # The nearest accuracy from here up, or of equally near ones the worst.
    enough = sorted(
        (each for each in of_ranks if each.frames >= frames),
        key=lambda each: (each.frames, each.num_ranks, each.percent),
    )
    unknown = "" if enough else "all"
    if of_ranks and not enough:
        unknown = f"frames > {max(each.frames for each in of_ranks):,}"
    elif known and not enough:
        unknown = f"ranks > {max(each.num_ranks for each in known)}"
    return Candidate(
        trainer,
        {**settings, **SETTINGS.get(trainer, {})},
        model.speed_up(num_ranks, _step_seconds(model, num_ranks, key)),
        next((each for each in enough if each.source == SIMULATED), None),
        next((each for each in enough if each.source != SIMULATED), None),
        unknown,
    )


def _step_seconds(model: CostModel, num_ranks: int, key: Key) -> float:
    trainer, group_size, block_size = key
    if trainer in ("bmuf", "htm"):
        return model.htm(num_ranks, group_size, block_size)
    if block_size:
        return model.coded_blocks(num_ranks, block_size, TOP_K, by_host=trainer == BY_HOST)
    return {
        "synchronous": model.synchronous(num_ranks),
        "gtc": model.gtc(num_ranks),
        "one_bit": model.one_bit(num_ranks),
        "d_psgd": model.ring_mixing(num_ranks, permuted=False),
        "ad_psgd": model.pairwise_mixing(num_ranks),
        "rand_psgd": model.ring_mixing(num_ranks, permuted=True),
        "d1d_psgd": model.delayed_average(num_ranks),
    }[trainer]
