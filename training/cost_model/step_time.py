"""Compute each trainer's seconds per step, and its speed-up on many ranks.

Seconds depend on a `ScalingCalibration`: the rates of one rank, the links, and two fitted numbers.
An exchange takes latency, its bytes over the busiest link (alpha-beta), and congestion. Trainers
that exchange beside the gradients take the longer of both: 1-bit SGD with double buffering (eq. (4)
of paper 004) and the decentralized family (001). Blocks that send the largest parts of their
changes are those of SparseLoCo (arXiv 2508.15706), and of BMUF whose hosts' leaders exchange by
top-k.
"""

import math
from dataclasses import dataclass
from math import ceil, log2
from typing import Annotated, Literal

from infra.settings import Range, Text, check_ranges
from training.algorithms.top_k_lengths import num_message_words
from training.settings.trainers import TopK

Pattern = Literal["ring", "direct"]
"""`ring`: each rank exchanges with its neighbour, in turns; `direct`: with all others at once."""

Rate = Annotated[float, Range(1e-9, 1e18)]
Latency = Annotated[float, Range(0, 1e9)]
Share = Annotated[float, Range(0, 1000)]
NumParameters = Annotated[int, Range(1, 10**15)]


@dataclass(frozen=True, slots=True)
class RankRates:
    """RankRates holds the speed of one rank alone, on a model of `num_parameters`.

    Encoding a GTC message counts the model's elements; decoding counts the words received.
    """

    frames_per_s: Rate
    num_parameters: NumParameters
    encoded_elements_per_s: Rate
    decoded_words_per_s: Rate

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class Network:
    """Network holds the links within a host and between hosts, each way, and the exchange patterns.

    Each rank has `within_gbps` for itself. The `ranks_per_host` of a host share its `between_gbps`,
    and one connection between hosts gets at most `connection_gbps`.
    """

    ranks_per_host: Annotated[int, Range(1, 1_000_000)]
    within_gbps: Rate
    within_latency_us: Latency
    between_gbps: Rate
    connection_gbps: Rate
    between_latency_us: Latency
    all_gather: Pattern
    all_reduce: Pattern

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fitted holds two costs beyond latency and bandwidth, fitted on speed-ups of up to 64 ranks.

    `waiting`: the share of a step's computing that ranks wait for the slowest one, added for each
    doubling of the ranks. `congestion`: the share by which each further connection slows a host's
    link.
    """

    waiting: Share
    congestion: Share

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class ScalingCalibration:
    """ScalingCalibration holds all rates of a prediction; `source` says where they come from."""

    source: Annotated[str, Text(1, 1000)]
    rank: RankRates
    network: Network
    fitted: Fitted

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement is the number of ranks that exchange, with at most `per_host` on each host."""

    num_ranks: int
    per_host: int

    def __post_init__(self) -> None:
        assert 1 <= self.per_host <= self.num_ranks, f"{self}"

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts that the ranks need."""
        return ceil(self.num_ranks / self.per_host)


WORD_BYTES = 4
MAP_BITS = 2
"""A GTC message has one word for each sent element, or two bits for every element (003 VI-A)."""


@dataclass(frozen=True, slots=True)
class ScalingWorkload:
    """ScalingWorkload is a model and its minibatches; GTC sends a share `density` of it."""

    num_parameters: NumParameters
    minibatch_frames: Annotated[int, Range(1, 10_000_000)]
    density: Annotated[float, Range(0, 1)]

    __post_init__ = check_ranges

    @property
    def model_bytes(self) -> float:
        """Return the bytes of the model, which BMUF exchanges."""
        return WORD_BYTES * float(self.num_parameters)

    @property
    def message_bytes(self) -> float:
        """Return the bytes of one GTC message, in the shorter of its two encodings."""
        indices = WORD_BYTES * self.density * self.num_parameters
        return WORD_BYTES + min(indices, MAP_BITS / 8 * self.num_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchCosts:
    """MinibatchCosts holds the terms of eq. (4), in seconds of one rank.

    `frame` is T_calc^frm, of one frame. `postprocessing` is C T_calc^post, all passes of AdaGrad
    and momentum. `model_update` is T_calc^upd, which does not shrink with more ranks. `exchange` is
    T_comm^float, of gradients in float32, which `compression`, Z, divides: 32 for 1 bit.
    """

    frame: float
    postprocessing: float
    model_update: float
    exchange: float
    compression: float

    @property
    def communication(self) -> float:
        """Return T_comm, the seconds of an exchange, which do not depend on the ranks (3.1)."""
        return self.exchange / self.compression

    def computation(self, num_frames: int | float, num_ranks: int | float) -> float:
        """Return T_calc of eq. (3), the seconds that so many ranks compute between exchanges."""
        shared = num_frames * self.frame + self.postprocessing
        return shared / num_ranks + self.model_update

    def double_buffered_seconds(self, minibatch_frames: int, num_ranks: int) -> float:
        """Return the seconds a minibatch with double buffering: two halves, each overlapped (2.2).

        Each half updates the model, so the fixed cost counts twice (5.1).
        """
        half = self.computation(minibatch_frames / 2, num_ranks)
        return 2 * max(half, self.communication)

    def optimal_num_ranks(self, minibatch_frames: int) -> float:
        """Return K of eq. (4), at which double-buffered computation takes as long as communication.

        It is infinite where communication takes no longer than the fixed cost: then no number of
        ranks saturates the link, and double buffering has no use (2.3).
        """
        headroom = self.communication - self.model_update
        if headroom <= 0:
            return math.inf
        return (minibatch_frames / 2 * self.frame + self.postprocessing) / headroom


COMPRESSION = 32.0
"""Bits of a float32 for each that is sent: Z of paper 004 on a link without latency."""

QUANTIZATION_PASSES = 3
"""A rank quantizes all gradients, adds all stripes up and unquantizes all: three passes."""

POSTPROCESSING_PASSES = 3
"""C of 004 eq. (4), over a rank's stripe alone: momentum, AdaGrad's squares and its division."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """CostModel computes mean seconds per step; ranks are consecutive, host by host."""

    workload: ScalingWorkload
    calibration: ScalingCalibration

    @property
    def computing_seconds(self) -> float:
        """Return the seconds of a step of one rank alone, without any exchange."""
        rank, workload = self.calibration.rank, self.workload
        # Time grows with the parameters.
        frames_per_s = rank.frames_per_s * rank.num_parameters / workload.num_parameters
        return workload.minibatch_frames / frames_per_s

    def training_seconds(self, num_ranks: int) -> float:
        """Return a step's computing, and what a rank waits for the slowest of N: a share, log N."""
        return self.computing_seconds * (1 + self.calibration.fitted.waiting * log2(num_ranks))

    def speed_up(self, num_ranks: int, step_seconds: float) -> float:
        """Return the frames a second of all ranks, relative to one rank alone."""
        return num_ranks * self.computing_seconds / step_seconds

    def placed(self, num_ranks: int) -> Placement:
        """Place consecutive ranks, host by host."""
        return Placement(num_ranks, min(num_ranks, self.calibration.network.ranks_per_host))

    def all_gather(self, message_bytes: float, ranks: Placement) -> float:
        """Return the seconds in which each rank receives the messages of all others."""
        if self.calibration.network.all_gather == "direct":
            return self._direct(message_bytes, ranks)
        return (ranks.num_ranks - 1) * self._hop(message_bytes, ranks)

    def all_reduce(self, num_bytes: float, ranks: Placement) -> float:
        """Return the seconds of summing `num_bytes` over ranks: reduce-scatter, then all-gather."""
        # A ring moves 2 (N - 1) / N of the model over each rank's link (003 VI, its [57]).
        stripe_bytes = num_bytes / ranks.num_ranks
        if self.calibration.network.all_reduce == "direct":
            return 2 * self._direct(stripe_bytes, ranks)
        return 2 * (ranks.num_ranks - 1) * self._hop(stripe_bytes, ranks)

    def broadcast(self, num_bytes: float, ranks: Placement) -> float:
        """Return the seconds of sending to all others, by a tree over hosts, then over ranks."""
        between, within = ceil(log2(ranks.num_hosts)), ceil(log2(ranks.per_host))
        return between * self._between(num_bytes) + within * self._within(num_bytes)

    def neighbours(self, num_bytes: float, ranks: Placement, *, permuted: bool) -> float:
        """Return the seconds in which each rank gets the values of its two neighbours on a ring.

        On a ring of consecutive ranks a host's link carries two messages each way. On a permuted
        one it carries those of all its ranks, but for the share of neighbours on the same host.
        """
        if ranks.num_ranks == 1:
            return 0.0
        network, num_neighbours = self.calibration.network, min(ranks.num_ranks - 1, 2)
        within = num_neighbours * self._within(num_bytes)
        if ranks.num_hosts == 1:
            return within
        messages = float(num_neighbours)
        if permuted:
            elsewhere = (ranks.num_ranks - ranks.per_host) / (ranks.num_ranks - 1)
            messages = max(1.0, num_neighbours * ranks.per_host * elsewhere)
        shared = messages * _seconds(num_bytes, network.between_gbps)
        alone = _seconds(num_bytes, network.connection_gbps)
        return max(within, network.between_latency_us / 1e6 + max(shared, alone))

    def _hop(self, num_bytes: float, ranks: Placement) -> float:
        """Return the seconds of one turn of a ring, which is as slow as its slowest hop."""
        within = self._within(num_bytes) if ranks.per_host > 1 else 0.0
        between = self._between(num_bytes) if ranks.num_hosts > 1 else 0.0
        return max(within, between)

    def _direct(self, num_bytes: float, ranks: Placement) -> float:
        network, congestion = self.calibration.network, self.calibration.fitted.congestion
        # Within the host: one message from each of its other ranks.
        within = (ranks.per_host - 1) * self._within(num_bytes)
        elsewhere = ranks.num_ranks - ranks.per_host
        if elsewhere == 0:
            return within
        # Between hosts: all connections share the link, but one alone cannot use all of it.
        connections = ranks.per_host * elsewhere
        shared = max(
            connections * _seconds(num_bytes, network.between_gbps),
            _seconds(num_bytes, network.connection_gbps),
        )
        latency = elsewhere * network.between_latency_us / 1e6
        return within + latency + shared * (1 + congestion * (connections - 1))

    def _within(self, num_bytes: float) -> float:
        network = self.calibration.network
        return network.within_latency_us / 1e6 + _seconds(num_bytes, network.within_gbps)

    def _between(self, num_bytes: float) -> float:
        network = self.calibration.network
        gbps = min(network.connection_gbps, network.between_gbps)
        return network.between_latency_us / 1e6 + _seconds(num_bytes, gbps)

    def synchronous(self, num_ranks: int) -> float:
        """Return the seconds per step of S-SGD: an all-reduce of the gradients every step."""
        exchange = self.all_reduce(self.workload.model_bytes, self.placed(num_ranks))
        return self.training_seconds(num_ranks) + exchange

    def gtc(self, num_ranks: int) -> float:
        """Return the seconds per step of GTC: an all-gather of sparse messages every step."""
        return self.training_seconds(num_ranks) + self._messages(self.placed(num_ranks))

    def bmuf(self, num_ranks: int, block_size: int) -> float:
        """Return the seconds per step of BMUF: an all-reduce of models every `block_size` steps."""
        # A block's steps share one exchange, hence the nearly linear scaling of 003 Table I.
        exchange = self.all_reduce(self.workload.model_bytes, self.placed(num_ranks))
        return self.training_seconds(num_ranks) + exchange / block_size

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
        per_host = self.placed(num_ranks).per_host
        if per_host % group_size and group_size % per_host:
            raise ValueError(
                f"group_size = {group_size}: need a divisor or a multiple of {per_host}, the ranks "
                "of a host"
            )
        group = self.placed(group_size)
        leaders = Placement(num_ranks // group_size, max(per_host // group_size, 1))
        # At a block's end the leaders average their models and broadcast the mean to their groups.
        model_bytes = self.workload.model_bytes
        block_end = self.all_reduce(model_bytes, leaders) + self.broadcast(model_bytes, group)
        return self.training_seconds(num_ranks) + self._messages(group) + block_end / block_size

    def _messages(self, ranks: Placement) -> float:
        """Return the seconds of encoding, exchanging and decoding GTC's messages."""
        rates, workload = self.calibration.rank, self.workload
        words = workload.density * workload.num_parameters
        encoding = workload.num_parameters / rates.encoded_elements_per_s
        # Each rank decodes all messages, so decoding grows with N where encoding does not.
        decoding = ranks.num_ranks * words / rates.decoded_words_per_s
        return encoding + self.all_gather(workload.message_bytes, ranks) + decoding

    def one_bit_costs(self, num_ranks: int) -> MinibatchCosts:
        """Return the terms of 004 eq. (4): a step's minibatch is that of all ranks.

        A pass over the gradients is assumed to take as long as one of GTC's encoding. Fewer bits do
        not shorten a link's latency, so Z is what they save of an exchange's seconds.
        """
        workload, ranks = self.workload, self.placed(num_ranks)
        exchange = self.all_reduce(workload.model_bytes, ranks)
        quantized = self.all_reduce(workload.model_bytes / COMPRESSION, ranks)
        pass_s = workload.num_parameters / self.calibration.rank.encoded_elements_per_s
        return MinibatchCosts(
            frame=self.computing_seconds / workload.minibatch_frames,
            postprocessing=POSTPROCESSING_PASSES * pass_s,
            model_update=QUANTIZATION_PASSES * pass_s,
            exchange=exchange,
            compression=exchange / quantized if quantized > 0 else COMPRESSION,
        )

    def one_bit(self, num_ranks: int) -> float:
        """Return the seconds per step of 1-bit SGD, half of which hides an exchange (004 2.2)."""
        frames = num_ranks * self.workload.minibatch_frames
        waiting = self.training_seconds(num_ranks) - self.computing_seconds
        return self.one_bit_costs(num_ranks).double_buffered_seconds(frames, num_ranks) + waiting

    def ring_mixing(self, num_ranks: int, *, permuted: bool) -> float:
        """Return the seconds per step of D-PSGD, or of RAND-PSGD on a permuted ring (001 2, 3).

        A rank waits for two neighbours, and sends each its model while it computes the gradients.
        """
        model_bytes, ranks = self.workload.model_bytes, self.placed(num_ranks)
        exchange = self.neighbours(model_bytes, ranks, permuted=permuted)
        return max(self.training_seconds(min(num_ranks, 3)), exchange)

    def pairwise_mixing(self, num_ranks: int) -> float:
        """Return the seconds per step of AD-PSGD with an exchange a step; no rank waits for others.

        A slower link makes exchanges rarer and no step longer, but what that loses is not measured.
        So a step takes as long as its exchange: half of a permuted ring's bytes.
        """
        ranks = self.placed(num_ranks)
        both = self.neighbours(self.workload.model_bytes, ranks, permuted=True)
        return max(self.computing_seconds, both / 2)

    def delayed_average(self, num_ranks: int) -> float:
        """Return the seconds per step of D1D-PSGD: an all-reduce beside the gradients (001 4)."""
        exchange = self.all_reduce(self.workload.model_bytes, self.placed(num_ranks))
        return max(self.training_seconds(num_ranks), exchange)

    def coded_blocks(self, num_ranks: int, block_size: int, code: TopK, *, by_host: bool) -> float:
        """Return the seconds per step where ranks gather the coded changes of all, once a block.

        By host the ranks of each host sum their models first, their leaders exchange the coded
        changes, and the new model is broadcast.
        """
        ranks, rates = self.placed(num_ranks), self.calibration.rank
        num_elements, model_bytes = self.workload.num_parameters, self.workload.model_bytes
        leaders = Placement(ranks.num_hosts, 1) if by_host else ranks
        message_bytes = float(WORD_BYTES * num_message_words(num_elements, code))
        # Every one who gathers decodes all messages, so decoding grows with their number.
        block_end = (
            num_elements / rates.encoded_elements_per_s
            + self.all_gather(message_bytes, leaders)
            + leaders.num_ranks * code.density * num_elements / rates.decoded_words_per_s
        )
        if by_host:
            host = Placement(ranks.per_host, ranks.per_host)
            block_end += self.all_reduce(model_bytes, host) + self.broadcast(model_bytes, host)
        return self.training_seconds(num_ranks) + block_end / block_size


def _seconds(num_bytes: float, gbps: float) -> float:
    return 8e-9 * num_bytes / gbps
