"""Compute the seconds of exchanges from latency, bytes (alpha-beta) and congestion."""

from dataclasses import dataclass
from math import ceil, log2

from training.cost_model.calibration import Network


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement is the number of ranks that exchange, with at most `per_host` on each host."""

    num_ranks: int
    per_host: int

    def __post_init__(self) -> None:
        if not 1 <= self.per_host <= self.num_ranks:
            raise ValueError(
                f"{self.per_host} ranks a host: need 1..{self.num_ranks}, the ranks that exchange"
            )

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts that the ranks need."""
        return ceil(self.num_ranks / self.per_host)

    @property
    def num_connections(self) -> int:
        """Return the connections over one host's link if each rank exchanges with every other."""
        return self.per_host * (self.num_ranks - self.per_host)


def place_ranks(num_ranks: int, network: Network) -> Placement:
    """Place consecutive ranks, host by host."""
    return Placement(num_ranks, min(num_ranks, network.ranks_per_host))


def all_gather_seconds(
    message_bytes: float, placement: Placement, network: Network, congestion: float
) -> float:
    """Return the seconds in which each rank receives the messages of all others."""
    if network.all_gather == "direct":
        return _direct_seconds(message_bytes, placement, network, congestion)
    return (placement.num_ranks - 1) * _hop_seconds(message_bytes, placement, network)


def all_reduce_seconds(
    num_bytes: float, placement: Placement, network: Network, congestion: float
) -> float:
    """Return the seconds of summing `num_bytes` over ranks: reduce-scatter, then all-gather."""
    # A ring moves 2 (N - 1) / N of the model over each rank's link (003 VI, its [57]).
    stripe_bytes = num_bytes / placement.num_ranks
    if network.all_reduce == "direct":
        return 2 * _direct_seconds(stripe_bytes, placement, network, congestion)
    return 2 * (placement.num_ranks - 1) * _hop_seconds(stripe_bytes, placement, network)


def broadcast_seconds(num_bytes: float, placement: Placement, network: Network) -> float:
    """Return the seconds of sending `num_bytes` to all others, by a tree over hosts, then ranks."""
    between = ceil(log2(placement.num_hosts))
    within = ceil(log2(placement.per_host))
    return between * _connection_seconds(num_bytes, network) + within * _within_seconds(
        num_bytes, network
    )


def neighbours_seconds(
    num_bytes: float, placement: Placement, network: Network, *, permuted: bool
) -> float:
    """Return the seconds in which each rank gets the values of its two neighbours on a ring.

    On a ring of consecutive ranks a host's link carries two messages each way. On a permuted one
    it carries those of all its ranks, but for the share of neighbours that are on the same host.
    """
    if placement.num_ranks == 1:
        return 0.0
    num_neighbours = min(placement.num_ranks - 1, 2)
    within = num_neighbours * _within_seconds(num_bytes, network)
    if placement.num_hosts == 1:
        return within
    messages = float(num_neighbours)
    if permuted:
        elsewhere = (placement.num_ranks - placement.per_host) / (placement.num_ranks - 1)
        messages = max(1.0, num_neighbours * placement.per_host * elsewhere)
    shared = messages * _seconds(num_bytes, network.between_gbps)
    alone = _seconds(num_bytes, network.connection_gbps)
    return max(within, network.between_latency_us / 1e6 + max(shared, alone))


def _hop_seconds(message_bytes: float, placement: Placement, network: Network) -> float:
    """Return the seconds of one turn of a ring, which is as slow as its slowest hop."""
    if placement.num_ranks == 1:
        return 0.0
    within = _within_seconds(message_bytes, network) if placement.per_host > 1 else 0.0
    between = _connection_seconds(message_bytes, network) if placement.num_hosts > 1 else 0.0
    return max(within, between)


def _direct_seconds(
    message_bytes: float, placement: Placement, network: Network, congestion: float
) -> float:
    # Within the host: one message from each of its other ranks.
    connections = placement.num_connections
    within = (placement.per_host - 1) * _within_seconds(message_bytes, network)
    if connections == 0:
        return within
    # Between hosts: all connections share the link, but one alone cannot use all of it.
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
