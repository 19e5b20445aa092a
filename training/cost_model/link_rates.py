"""Measure the link between two ranks: latency and bandwidth of the trainers' own exchange."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from training.distributed import collectives, process_group
from training.distributed.gather import gather_ragged

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
    seconds = [_exchange_seconds(words, group) for words in MESSAGE_WORDS]
    return fit_link([4.0 * words for words in MESSAGE_WORDS], seconds)


def _exchange_seconds(num_words: int, group: process_group.ProcessGroup) -> float:
    message = torch.zeros(num_words, dtype=torch.int32)
    seconds = []
    for _ in range(NUM_ROUNDS):
        collectives.barrier(group)
        started = time.perf_counter()
        gather_ragged(message, group, "the link's time")
        seconds.append(time.perf_counter() - started)
    return median(seconds)


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
