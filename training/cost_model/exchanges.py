"""Seconds that exchanges between ranks take: latency and bytes (alpha-beta), and congestion."""

from dataclasses import dataclass
from math import ceil, log2

from training.cost_model.calibration import Network


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks that exchange with each other, at most `per_host` of them on each host."""

    num_ranks: int
    per_host: int

    def __post_init__(self) -> None:
        if not 1 <= self.per_host <= self.num_ranks:
            raise ValueError(
                f"{self.per_host} ranks a host: need 1..{self.num_ranks}, the ranks that exchange"
            )

    @property
    def num_hosts(self) -> int:
        """How many hosts the ranks are on."""
        return ceil(self.num_ranks / self.per_host)

    @property
    def num_connections(self) -> int:
        """Connections over one host's link where each rank exchanges with every other."""
        return self.per_host * (self.num_ranks - self.per_host)


def placed(num_ranks: int, network: Network) -> Placement:
    """Consecutive ranks, host by host."""
    return Placement(num_ranks, min(num_ranks, network.ranks_per_host))


def all_gather_seconds(
    message_bytes: float, placement: Placement, network: Network, congestion: float
) -> float:
    """Each rank's message to all others."""
    if network.all_gather == "direct":
        return _direct_seconds(message_bytes, placement, network, congestion)
    return (placement.num_ranks - 1) * _hop_seconds(message_bytes, placement, network)


def all_reduce_seconds(
    num_bytes: float, placement: Placement, network: Network, congestion: float
) -> float:
    """The sum of all ranks' `num_bytes`, in two stages: stripes are summed, then gathered."""
    stripe_bytes = num_bytes / placement.num_ranks
    if network.all_reduce == "direct":
        return 2 * _direct_seconds(stripe_bytes, placement, network, congestion)
    return 2 * (placement.num_ranks - 1) * _hop_seconds(stripe_bytes, placement, network)


def broadcast_seconds(num_bytes: float, placement: Placement, network: Network) -> float:
    """One rank's `num_bytes` to all others, by a tree over the hosts, then within each."""
    between = ceil(log2(placement.num_hosts))
    within = ceil(log2(placement.per_host))
    return between * _connection_seconds(num_bytes, network) + within * _within_seconds(
        num_bytes, network
    )


def _hop_seconds(message_bytes: float, placement: Placement, network: Network) -> float:
    """One turn of a ring, which is as slow as its slowest hop."""
    if placement.num_ranks == 1:
        return 0.0
    within = _within_seconds(message_bytes, network) if placement.per_host > 1 else 0.0
    between = _connection_seconds(message_bytes, network) if placement.num_hosts > 1 else 0.0
    return max(within, between)


def _direct_seconds(
    message_bytes: float, placement: Placement, network: Network, congestion: float
) -> float:
    connections = placement.num_connections
    within = (placement.per_host - 1) * _within_seconds(message_bytes, network)
    if connections == 0:
        return within
    latency = (placement.num_ranks - placement.per_host) * network.between_latency_us / 1e6
    shared = max(
        connections * _seconds(message_bytes, network.between_gbps),
        _seconds(message_bytes, network.connection_gbps),
    )
    return within + latency + shared * (1 + congestion * (connections - 1))


def _within_seconds(num_bytes: float, network: Network) -> float:
    return network.within_latency_us / 1e6 + _seconds(num_bytes, network.within_gbps)


def _connection_seconds(num_bytes: float, network: Network) -> float:
    gbps = min(network.connection_gbps, network.between_gbps)
    return network.between_latency_us / 1e6 + _seconds(num_bytes, gbps)


def _seconds(num_bytes: float, gbps: float) -> float:
    return 8e-9 * num_bytes / gbps
