"""Choose a trainer for a link, a number of ranks and a model: the fastest that keeps the accuracy.

Seconds are the cost model's. Accuracies are measured on simulated ranks, of the same frames and
passes as one rank: `tests.benchmarks.papers_tables` and `tests.benchmarks.trainer_tables`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from training.configuration.block_codes import TopK
from training.cost_model.coded_blocks import coded_block_seconds
from training.cost_model.overlapped_steps import (
    delayed_average_seconds,
    one_bit_seconds,
    pairwise_mixing_seconds,
    ring_mixing_seconds,
)
from training.cost_model.recommendation import Choice
from training.cost_model.step_time import CostModel

KEPT_ACCURACY = -1.0
"""Percent of one rank's frame accuracy that a choice may lose: the spread of seeds is 0.5."""

EQUALLY_FAST = 0.9
"""Of trainers within this share of the fastest one's speed the most accurate is chosen."""

MEASURED: Mapping[str, Mapping[int, float]] = {
    "synchronous": {1: 0.0},
    "gtc": {16: 0.4, 32: -0.5, 64: -2.0, 128: -3.3},
    "bmuf": {16: 0.8, 32: 1.1, 64: -0.7, 128: -3.5},
    "htm": {16: -0.1, 32: 0.6, 64: 0.6, 128: 0.0},
    # Of a feed-forward network, with double buffering; an LSTM's is 0.4.
    "one_bit": {4: 0.0},
    # Of a feed-forward network in four passes, by momentum 0.9.
    "d_psgd": {16: -0.9, 32: -2.5, 64: -9.0},
    "ad_psgd": {16: -0.9, 32: -3.8, 64: -12.8},
    "rand_psgd": {16: -1.6, 32: -2.9, 64: -5.8},
    "d1d_psgd": {16: -9.9, 32: -9.9, 64: -9.9},
}
"""Percent of frame accuracy relative to one rank, the median of three seeds, by ranks."""

BY_HOST_CODE = TopK(density=0.1)
"""The race's winner at 5 and 20 Mbit/s: `tests.benchmarks.slow_link`."""


UNMEASURED = {
    "sparse_loco": "accuracy not measured",
    "bmuf by host, top_k": "accuracy not measured; first at 20 Mbit/s",
}
"""The others have seconds to a loss on a slow link alone: `tests.benchmarks.slow_link`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate is a trainer's predicted speed-up, and its accuracy on `measured_ranks` ranks."""

    trainer: str
    speed_up: float
    accuracy: float
    measured_ranks: int

    @property
    def is_accurate(self) -> bool:
        """Return whether it keeps one rank's accuracy."""
        return self.accuracy >= KEPT_ACCURACY


@dataclass(frozen=True, slots=True)
class TrainerChoice:
    """TrainerChoice is the chosen trainer, and all candidates from the fastest on.

    `unmeasured` are the speed-ups of trainers whose accuracy is not known: no choice is made of
    them.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    unmeasured: Mapping[str, float]

    def reason(self, candidate: Candidate) -> str:
        """Say why a candidate is chosen, or is not."""
        if candidate == self.chosen:
            return "chosen: the most accurate of the fastest"
        if not candidate.is_accurate:
            return f"loses more than {-KEPT_ACCURACY:g} %"
        if candidate.speed_up < EQUALLY_FAST * self.chosen.speed_up:
            return f"slower, {candidate.speed_up / self.chosen.speed_up:.2f} of the choice's speed"
        return "as fast, and less accurate"


def choose_trainer(model: CostModel, num_ranks: int, htm: Choice) -> TrainerChoice:
    """Return the choice for so many ranks; `htm` has the settings of HTM and BMUF.

    Where no trainer keeps one rank's accuracy, the most accurate one is chosen.
    """
    speed_ups = {
        name: model.speed_up(num_ranks, seconds)
        for name, seconds in step_seconds(model, num_ranks, htm).items()
    }
    candidates = [_candidate(name, num_ranks, speed_ups[name]) for name in MEASURED]
    candidates.sort(key=lambda each: -each.speed_up)
    accurate = [each for each in candidates if each.is_accurate] or candidates
    enough = EQUALLY_FAST * accurate[0].speed_up if accurate[0].is_accurate else 0.0
    fast = [each for each in accurate if each.speed_up >= enough]
    chosen = max(fast, key=lambda each: each.accuracy)
    unmeasured = {name: speed_ups[name] for name in UNMEASURED}
    return TrainerChoice(chosen, tuple(candidates), unmeasured)


def step_seconds(model: CostModel, num_ranks: int, htm: Choice) -> Mapping[str, float]:
    """Return each trainer's seconds per step, by the name that recipes give it, and its code."""
    return {
        "synchronous": model.synchronous(num_ranks),
        "gtc": model.gtc(num_ranks),
        "bmuf": model.bmuf(num_ranks, htm.block_size),
        "htm": model.htm(num_ranks, htm.group_size, htm.block_size),
        "one_bit": one_bit_seconds(model, num_ranks, double_buffering=True),
        "d_psgd": ring_mixing_seconds(model, num_ranks, permuted=False),
        "ad_psgd": pairwise_mixing_seconds(model, num_ranks),
        "rand_psgd": ring_mixing_seconds(model, num_ranks, permuted=True),
        "d1d_psgd": delayed_average_seconds(model, num_ranks),
        "sparse_loco": coded_block_seconds(model, num_ranks, htm.block_size, TopK(), by_host=False),
        "bmuf by host, top_k": coded_block_seconds(
            model, num_ranks, htm.block_size, BY_HOST_CODE, by_host=True
        ),
    }


def _candidate(trainer: str, num_ranks: int, speed_up: float) -> Candidate:
    """Take the accuracy of the next number of ranks that is measured, or of the most."""
    measured = MEASURED[trainer]
    enough = [each for each in measured if each >= num_ranks] or [max(measured)]
    return Candidate(trainer, speed_up, measured[min(enough)], min(enough))
