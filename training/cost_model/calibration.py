"""What the model's seconds rest on: one rank, the links between ranks, two fitted numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

Pattern = Literal["ring", "direct"]
"""How ranks exchange: each with its neighbour, in turns; or each with every other, at once."""


@dataclass(frozen=True, slots=True)
class RankRates:
    """One rank alone, on a model of `num_parameters`: training, and its own work on GTC's messages.

    Encoding counts the model's elements; decoding, the words received.
    """

    frames_per_s: float
    num_parameters: int
    encoded_elements_per_s: float
    decoded_words_per_s: float

    def __post_init__(self) -> None:
        _require_positive(self, [each.name for each in fields(self)])

    def frames_per_s_of(self, num_parameters: int) -> float:
        """Frames a second of a model of another size: time goes as the parameters."""
        return self.frames_per_s * self.num_parameters / num_parameters


@dataclass(frozen=True, slots=True)
class Network:
    """Links within a host and between hosts, each way, and how trainers use them.

    `within_gbps` is a rank's own. `between_gbps` is a host's, shared by its `ranks_per_host`; one
    connection of it gets at most `connection_gbps`.
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
    """What latency and bandwidth leave out, fitted on speed-ups of up to 64 ranks.

    `waiting`: the share of a step's computing that ranks wait for the slowest of them, each time
    their number doubles. `congestion`: the share by which each further connection at once makes a
    host's link slower.
    """

    waiting: float
    congestion: float

    def __post_init__(self) -> None:
        _require_not_negative(self, ["waiting", "congestion"])


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that a prediction rests on, and where it comes from."""

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
