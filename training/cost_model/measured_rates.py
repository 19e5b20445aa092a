"""Time the trainers' own code: the link between two ranks, and work on GTC's messages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np
import torch
from scipy.special import ndtri

from training.distributed import collectives, process_group
from training.distributed.collectives import gather_ragged
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.trainers.gtc import ThresholdedSum, capacity_for

NUM_ROUNDS = 7
MESSAGE_WORDS = (1, 2**10, 2**14, 2**18, 2**20, 2**22)
"""Lengths of the timed messages, up to 16 MB."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """LinkRates describes one exchange between two ranks; latency covers lengths and words."""

    latency_us: float
    gbps: float


def measure_link(group: process_group.ProcessGroup) -> LinkRates:
    """Time exchanges of messages of many sizes between the two ranks of `group`.

    Raises ValueError for another number of ranks, or if longer messages take no longer.
    """
    if group.size() != 2:
        raise ValueError(f"{group.size()} ranks: need 2, one at each end of the link")
    medians = []
    for num_words in MESSAGE_WORDS:
        message, seconds = torch.zeros(num_words, dtype=torch.int32), []
        for _ in range(NUM_ROUNDS):
            collectives.barrier(group)
            started = time.perf_counter()
            gather_ragged(message, group, "the link's time")
            seconds.append(time.perf_counter() - started)
        medians.append(median(seconds))
    return fit_link([4.0 * words for words in MESSAGE_WORDS], medians)


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinkRates:
    """Fit latency and bandwidth to the times by least squares of the relative errors."""
    # seconds = latency + bytes / bandwidth, each equation divided by its measured seconds.
    columns = np.column_stack([np.ones(len(num_bytes)), num_bytes])
    relative = columns / np.asarray(seconds)[:, np.newaxis]
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(relative, np.ones(len(num_bytes)))
    if not s_per_byte > 0:
        raise ValueError(
            "longer messages took no longer: the machine is too busy to time a link; measure again "
            "when it is idle"
        )
    return LinkRates(latency_us=max(1e6 * float(latency_s), 0.0), gbps=8e-9 / float(s_per_byte))


NUM_ELEMENTS = 2**20
GPU_ELEMENTS = 2**24
"""On an H100 the 0.3 ms to launch a step's kernels were most of the time of 2^20 elements."""

NUM_RANKS = 8
NUM_STEPS = 5
LONG_MESSAGES = 1 / 32
"""Density for decoding: messages are long enough to be timed, and still lists of indices."""


@dataclass(frozen=True, slots=True)
class MessageRates:
    """MessageRates holds the elements encoded and the received words decoded per second."""

    encoded_elements_per_s: float
    decoded_words_per_s: float


def measure_messages(density: float, device: torch.device) -> MessageRates:
    """Time GTC's steps on one rank, and on several in turn, which decode each other's messages.

    Gradients are normal, with a threshold that a share `density` of them reaches.
    """
    if not 0 < density < 1:
        raise ValueError(f"density = {density}: need more than 0, less than 1, to be timed")
    num_elements = GPU_ELEMENTS if device.type == "cuda" else NUM_ELEMENTS
    step_seconds = partial(_step_seconds, num_elements, device)
    more = step_seconds(NUM_RANKS, LONG_MESSAGES) - step_seconds(1, LONG_MESSAGES)
    # One rank decodes its own message too, so the difference is that of the others.
    words = (NUM_RANKS - 1) * LONG_MESSAGES * num_elements
    # Noise of a busy machine may exceed the difference, which is then taken as a nanosecond.
    rate = words / max(more, 1e-9)
    encoding = step_seconds(1, density) - density * num_elements / rate
    return MessageRates(num_elements / max(encoding, 1e-9), rate)


def _step_seconds(num_elements: int, device: torch.device, num_ranks: int, density: float) -> float:
    """Return the seconds per rank and step, the least of several; one rank runs at a time."""
    times = simulate_ranks(num_ranks, _times_of_steps, num_elements, density, device)[0]
    steps = [after - before for before, after in pairwise(times)]
    return min(steps) / num_ranks


def _times_of_steps(
    group: ProcessGroup, num_elements: int, density: float, device: torch.device
) -> list[float]:
    """Return the times at which the steps began, and the last one ended."""
    gradients = [torch.randn(num_elements, device=device) for _ in range(NUM_STEPS)]
    sums = []
    for each in gradients:
        residual = torch.zeros_like(each)
        sums.append(ThresholdedSum(residual, float(-ndtri(density / 2))))
        # On a GPU, messages of the length that this density needs once it has settled.
        length = capacity_for(round(density * num_elements), num_elements)
        sums[-1].restore(residual, {"message_capacity": length})
    times = []
    for each, thresholded in zip(gradients, sums, strict=True):
        times.append(_now(device))
        thresholded.of(each, group)
    return [*times, _now(device)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
