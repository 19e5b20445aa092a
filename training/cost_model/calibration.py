"""Define what the cost model's seconds depend on: one rank, the links, and two fitted numbers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from infra.settings import Range, Text, check_ranges

Pattern = Literal["ring", "direct"]
"""`ring`: each rank exchanges with its neighbour, in turns; `direct`: with all others at once."""

Rate = Annotated[float, Range(1e-9, 1e18)]
Latency = Annotated[float, Range(0, 1e9)]
Share = Annotated[float, Range(0, 1000)]


@dataclass(frozen=True, slots=True)
class RankRates:
    """RankRates holds the speed of one rank alone, on a model of `num_parameters`.

    Encoding a GTC message counts the model's elements; decoding counts the words received.
    """

    frames_per_s: Rate
    num_parameters: Annotated[int, Range(1, 10**15)]
    encoded_elements_per_s: Rate
    decoded_words_per_s: Rate

    __post_init__ = check_ranges

    def frames_per_s_of(self, num_parameters: int) -> float:
        """Return the frames a second of a model of another size: time grows with the parameters."""
        return self.frames_per_s * self.num_parameters / num_parameters


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
class Calibration:
    """Calibration holds all rates of a prediction, and `source` says where they come from."""

    source: Annotated[str, Text(1, 1000)]
    rank: RankRates
    network: Network
    fitted: Fitted

    __post_init__ = check_ranges
