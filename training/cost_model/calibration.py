"""Define what the cost model's seconds depend on: one rank, the links, and two fitted numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

Pattern = Literal["ring", "direct"]
"""`ring`: each rank exchanges with its neighbour, in turns; `direct`: with all others at once."""


@dataclass(frozen=True, slots=True)
class RankRates:
    """RankRates holds the speed of one rank alone, on a model of `num_parameters`.

    Encoding a GTC message counts the model's elements; decoding counts the words received.
    """

    frames_per_s: float
    num_parameters: int
    encoded_elements_per_s: float
    decoded_words_per_s: float

    def __post_init__(self) -> None:
        _require_positive(self, [each.name for each in fields(self)])

    def frames_per_s_of(self, num_parameters: int) -> float:
        """Return the frames a second of a model of another size: time grows with the parameters."""
        return self.frames_per_s * self.num_parameters / num_parameters


@dataclass(frozen=True, slots=True)
class Network:
    """Network holds the links within a host and between hosts, each way, and the exchange patterns.

    Each rank has `within_gbps` for itself. The `ranks_per_host` of a host share its `between_gbps`,
    and one connection between hosts gets at most `connection_gbps`.
    """

    ranks_per_host: int
    within_gbps: float
    within_latency_us: float
    between_gbps: float
    connection_gbps: float
    between_latency_us: float
    all_gather: Pattern
    all_reduce: Pattern

    def __post_init__(self) -> None:
        names = ["ranks_per_host", "within_gbps", "between_gbps", "connection_gbps"]
        _require_positive(self, names)
        _require_not_negative(self, ["within_latency_us", "between_latency_us"])


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fitted holds two costs beyond latency and bandwidth, fitted on speed-ups of up to 64 ranks.

    `waiting`: the share of a step's computing that ranks wait for the slowest one, added for each
    doubling of the ranks. `congestion`: the share by which each further connection slows a host's
    link.
    """

    waiting: float
    congestion: float

    def __post_init__(self) -> None:
        _require_not_negative(self, ["waiting", "congestion"])


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration holds all rates of a prediction, and `source` says where they come from."""

    source: str
    rank: RankRates
    network: Network
    fitted: Fitted


def _require_positive(record: object, names: Sequence[str]) -> None:
    for name in names:
        if not getattr(record, name) > 0:
            raise ValueError(f"{name} = {getattr(record, name)}: need more than 0")


def _require_not_negative(record: object, names: Sequence[str]) -> None:
    for name in names:
        if not getattr(record, name) >= 0:
            raise ValueError(f"{name} = {getattr(record, name)}: need 0 or more")
