"""Check the seconds of exchanges against textbook counts of bytes, latencies and connections."""

from dataclasses import replace

import pytest

from tests.training.cost_model.settings import NETWORK
from training.cost_model.step_time import (
    Network,
    Placement,
    all_gather_seconds,
    all_reduce_seconds,
    broadcast_seconds,
    place_ranks,
)

MEGABYTE = 1e6
DIRECT = replace(NETWORK, all_reduce="direct")
RING = replace(NETWORK, all_gather="ring")


def test_ranks_fill_one_host_after_the_other() -> None:
    """A host has all ranks if they are few, else `ranks_per_host`; the last host may have fewer."""
    assert place_ranks(3, NETWORK) == Placement(3, 3)
    assert place_ranks(16, NETWORK) == Placement(16, 4)
    assert [place_ranks(num_ranks, NETWORK).num_hosts for num_ranks in (1, 4, 5, 16)] == [
        1,
        1,
        2,
        4,
    ]


def test_a_direct_gather_shares_the_hosts_link() -> None:
    """Four ranks a host each take twelve remote messages: 48 over one link, 3 within."""
    seconds = all_gather_seconds(MEGABYTE, Placement(16, 4), NETWORK, congestion=0.0)
    assert seconds == pytest.approx(48 * 10e-3 + 3 * 1e-3)


def test_one_connection_is_no_faster_than_its_limit() -> None:
    """Between two hosts of one rank a byte takes 20 ns, though the link itself takes 10 ns."""
    seconds = all_gather_seconds(MEGABYTE, Placement(2, 1), NETWORK, congestion=0.0)
    assert seconds == pytest.approx(20e-3)


def test_a_ring_passes_each_message_over_one_connection() -> None:
    """A ring has N - 1 turns, each as slow as the slowest hop."""
    assert all_gather_seconds(MEGABYTE, Placement(16, 4), RING, 1.0) == pytest.approx(15 * 20e-3)
    assert all_gather_seconds(MEGABYTE, Placement(4, 4), RING, 1.0) == pytest.approx(3 * 1e-3)


def test_a_ring_all_reduce_moves_twice_the_bytes() -> None:
    """2 (N - 1) / N of the bytes pass each hop, for any number of ranks (Patarasuk and Yuan)."""
    seconds = all_reduce_seconds(MEGABYTE, Placement(16, 4), NETWORK, congestion=1.0)
    assert seconds == pytest.approx(2 * 15 / 16 * 20e-3)


def test_a_two_stage_all_reduce_moves_stripes_directly() -> None:
    """There are two exchanges of a sixteenth of the bytes, 48 of them over each host's link."""
    seconds = all_reduce_seconds(MEGABYTE, Placement(16, 4), DIRECT, congestion=0.0)
    assert seconds == pytest.approx(2 * (48 * 10e-3 + 3 * 1e-3) / 16)


def test_a_broadcast_doubles_the_ranks_that_have_it() -> None:
    """There are two turns between four hosts, then two within each."""
    seconds = broadcast_seconds(MEGABYTE, Placement(16, 4), NETWORK)
    assert seconds == pytest.approx(2 * 20e-3 + 2 * 1e-3)


def test_latency_is_paid_for_each_turn_or_partner() -> None:
    """A ring of 16 has 15 turns; in a direct exchange there are 12 remote and 3 local waits."""
    slow = {"between_latency_us": 1000.0, "within_latency_us": 100.0}
    ring, direct = replace(RING, **slow), replace(NETWORK, **slow)
    assert all_gather_seconds(0.0, Placement(16, 4), ring, 0.0) == pytest.approx(15e-3)
    assert all_gather_seconds(0.0, Placement(16, 4), direct, 0.0) == pytest.approx(12e-3 + 0.3e-3)


@pytest.mark.parametrize("network", [NETWORK, DIRECT, RING])
def test_one_rank_exchanges_nothing(network: Network) -> None:
    """Every exchange of a single rank takes 0 s."""
    alone = Placement(1, 1)
    assert all_gather_seconds(MEGABYTE, alone, network, 1.0) == 0
    assert all_reduce_seconds(MEGABYTE, alone, network, 1.0) == 0
    assert broadcast_seconds(MEGABYTE, alone, network) == 0


def test_congestion_spares_a_single_connection() -> None:
    """Only further connections cost: 47 of them at 0.1 make a link 5.7 times slower."""
    assert all_gather_seconds(MEGABYTE, Placement(2, 1), NETWORK, 0.1) == pytest.approx(20e-3)
    congested = all_gather_seconds(MEGABYTE, Placement(16, 4), NETWORK, 0.1)
    assert congested == pytest.approx(48 * 10e-3 * 5.7 + 3 * 1e-3)


@pytest.mark.parametrize(("num_ranks", "per_host"), [(4, 5), (4, 0)])
def test_impossible_placements_are_refused(num_ranks: int, per_host: int) -> None:
    """A placement with no rank or with more than all ranks on a host is refused."""
    with pytest.raises(ValueError, match=r"ranks a host: need 1\.\.4"):
        Placement(num_ranks, per_host)
