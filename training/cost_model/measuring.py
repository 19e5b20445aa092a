"""One rank's own work on GTC's messages, timed on the trainer's own code."""

import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.stats import norm

from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.trainers.gtc import ThresholdedSum

NUM_ELEMENTS = 2**20
NUM_RANKS = 8
NUM_STEPS = 5
LONG_MESSAGES = 1 / 32
"""Density for decoding, where messages long enough to be timed are still lists of indices."""


@dataclass(frozen=True, slots=True)
class MessageRates:
    """Elements of the model encoded, and received words decoded, a second."""

    encoded_elements_per_s: float
    decoded_words_per_s: float


def measure_messages(density: float, device: torch.device) -> MessageRates:
    """Time GTC's steps on one rank, and on several in turn, who each decode as many messages.

    Gradients are normal, with a threshold that `density` of them reach.
    """
    if not 0 < density < 1:
        raise ValueError(f"density = {density}: need more than 0, less than 1, to be timed")
    more = _step_seconds(NUM_RANKS, LONG_MESSAGES, device) - _step_seconds(1, LONG_MESSAGES, device)
    words = (NUM_RANKS - 1) * LONG_MESSAGES * NUM_ELEMENTS
    # On a busy machine a difference may drown: then it is a nanosecond.
    rate = words / max(more, 1e-9)
    encoding = _step_seconds(1, density, device) - density * NUM_ELEMENTS / rate
    return MessageRates(NUM_ELEMENTS / max(encoding, 1e-9), rate)


def _step_seconds(num_ranks: int, density: float, device: torch.device) -> float:
    """Seconds a rank and step, the least of several; ranks take turns on one thread."""
    threshold = float(norm.isf(density / 2))
    times = simulate_ranks(num_ranks, _times_of_steps, threshold, device)[0]
    steps = [after - before for before, after in pairwise(times)]
    return min(steps) / num_ranks


def _times_of_steps(group: ProcessGroup, threshold: float, device: torch.device) -> list[float]:
    """When each step began, and the last one ended."""
    gradients = [torch.randn(NUM_ELEMENTS, device=device) for _ in range(NUM_STEPS)]
    sums = [ThresholdedSum(torch.full_like(each, 0.0), threshold) for each in gradients]
    times = []
    for each, thresholded in zip(gradients, sums, strict=True):
        times.append(_now(device))
        thresholded.of(each, group)
    return [*times, _now(device)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
