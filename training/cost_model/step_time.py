"""Compute each trainer's seconds per step, and its speed-up on many ranks."""

from dataclasses import dataclass
from math import log2

from training.cost_model.calibration import Calibration
from training.cost_model.exchanges import (
    Placement,
    all_gather_seconds,
    all_reduce_seconds,
    broadcast_seconds,
    place_ranks,
)

WORD_BYTES = 4
MAP_BITS = 2
"""A GTC message has one word for each sent element, or two bits for every element (003 VI-A)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload is a model and its minibatches; a GTC message sends a share `density` of it."""

    num_parameters: int
    minibatch_frames: int
    density: float

    def __post_init__(self) -> None:
        if self.num_parameters < 1 or self.minibatch_frames < 1:
            raise ValueError(
                f"{self.num_parameters} parameters, minibatches of {self.minibatch_frames} frames: "
                "need at least 1"
            )
        if not 0 <= self.density <= 1:
            raise ValueError(f"density = {self.density}: need 0..1, a share of the parameters")

    @property
    def model_bytes(self) -> float:
        """Return the bytes of the model, which BMUF exchanges."""
        return WORD_BYTES * float(self.num_parameters)

    @property
    def message_bytes(self) -> float:
        """Return the bytes of one GTC message, in the shorter of its two encodings."""
        indices = WORD_BYTES * self.density * self.num_parameters
        return WORD_BYTES + min(indices, MAP_BITS / 8 * self.num_parameters)


@dataclass(frozen=True, slots=True)
class CostModel:
    """CostModel computes mean seconds per step; ranks are consecutive, host by host."""

    workload: Workload
    calibration: Calibration

    @property
    def computing_seconds(self) -> float:
        """Return the seconds of a step of one rank alone, without any exchange."""
        frames_per_s = self.calibration.rank.frames_per_s_of(self.workload.num_parameters)
        return self.workload.minibatch_frames / frames_per_s

    def speed_up(self, num_ranks: int, step_seconds: float) -> float:
        """Return the frames a second of all ranks, relative to one rank alone."""
        return num_ranks * self.computing_seconds / step_seconds

    def synchronous(self, num_ranks: int) -> float:
        """Return the seconds per step of S-SGD: an all-reduce of the gradients every step."""
        return self._training(num_ranks) + self._all_reduce(self.placed(num_ranks))

    def gtc(self, num_ranks: int) -> float:
        """Return the seconds per step of GTC: an all-gather of sparse messages every step."""
        return self._training(num_ranks) + self._messages(self.placed(num_ranks))

    def bmuf(self, num_ranks: int, block_size: int) -> float:
        """Return the seconds per step of BMUF: an all-reduce of models every `block_size` steps."""
        # A block's steps share one exchange, hence the nearly linear scaling of 003 Table I.
        exchange = self._all_reduce(self.placed(num_ranks))
        return self._training(num_ranks) + exchange / block_size

    def htm(self, num_ranks: int, group_size: int, block_size: int) -> float:
        """Return the seconds per step of HTM: GTC within groups, BMUF between their leaders.

        Raises ValueError for groups that are unequal, or neither divide nor fill hosts.
        """
        if group_size == 1:
            return self.bmuf(num_ranks, block_size)
        if group_size == num_ranks:
            return self.gtc(num_ranks)
        if group_size < 1 or num_ranks % group_size:
            raise ValueError(f"group_size = {group_size}: need a divisor of {num_ranks}, the ranks")
        # At a block's end the leaders average their models and broadcast the mean to their groups.
        group, leaders = self.placed(group_size), self._leaders(num_ranks, group_size)
        broadcast = broadcast_seconds(self.workload.model_bytes, group, self.calibration.network)
        block_end = self._all_reduce(leaders) + broadcast
        return self._training(num_ranks) + self._messages(group) + block_end / block_size

    def placed(self, num_ranks: int) -> Placement:
        """Return where so many ranks are."""
        return place_ranks(num_ranks, self.calibration.network)

    def _leaders(self, num_ranks: int, group_size: int) -> Placement:
        per_host = min(num_ranks, self.calibration.network.ranks_per_host)
        if per_host % group_size and group_size % per_host:
            raise ValueError(
                f"group_size = {group_size}: need a divisor or a multiple of {per_host}, the ranks "
                "of a host"
            )
        return Placement(num_ranks // group_size, max(per_host // group_size, 1))

    def waiting_seconds(self, num_ranks: int) -> float:
        """Return what a rank waits in a step for the slowest of N: their mean's share, log N."""
        return self.computing_seconds * self.calibration.fitted.waiting * log2(num_ranks)

    def _training(self, num_ranks: int) -> float:
        return self.computing_seconds + self.waiting_seconds(num_ranks)

    def _all_reduce(self, ranks: Placement) -> float:
        network, congestion = self.calibration.network, self.calibration.fitted.congestion
        return all_reduce_seconds(self.workload.model_bytes, ranks, network, congestion)

    def _messages(self, ranks: Placement) -> float:
        rates, network = self.calibration.rank, self.calibration.network
        words = self.workload.density * self.workload.num_parameters
        encoding = self.workload.num_parameters / rates.encoded_elements_per_s
        # Each rank decodes all messages, so decoding grows with N where encoding does not.
        decoding = ranks.num_ranks * words / rates.decoded_words_per_s
        exchange = all_gather_seconds(
            self.workload.message_bytes, ranks, network, self.calibration.fitted.congestion
        )
        return encoding + exchange + decoding
