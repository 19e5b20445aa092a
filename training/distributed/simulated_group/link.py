"""Predict how long an exchange takes on a link, for the virtual time of simulated ranks."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """SimulatedLink is the link of each rank: every message takes `latency_s`, and its bytes.

    Exchanges under way at one time do not share it. The default takes no time.
    """

    latency_s: int | float = 0.0
    bytes_per_s: int | float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s = {self.latency_s}: need a finite number, at least 0")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s = {self.bytes_per_s}: need above 0")

    def message_s(self, num_bytes: int | float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def sum_s(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds of a ring's all-reduce: 2 (L - 1) messages of an L-th."""
        return 2 * (num_ranks - 1) * self.message_s(num_bytes / num_ranks)

    def gather_s(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds of a ring's all-gather: L - 1 messages of one rank's values."""
        return (num_ranks - 1) * self.message_s(num_bytes)

    def broadcast_s(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds of a binomial tree's messages, one after the other."""
        return (num_ranks - 1).bit_length() * self.message_s(num_bytes)
