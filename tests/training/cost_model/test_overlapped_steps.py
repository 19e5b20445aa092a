"""Seconds per step of trainers that exchange beside the gradients: limits, and equation (4)."""

from dataclasses import replace
from math import log2

import pytest

from tests.training.cost_model.settings import CALIBRATION, NETWORK, RANK, WORKLOAD
from training.cost_model.step_time import (
    Calibration,
    CostModel,
    Fitted,
    Network,
    RankRates,
    all_reduce_seconds,
    delayed_average_seconds,
    neighbours_seconds,
    one_bit_costs,
    one_bit_seconds,
    pairwise_mixing_seconds,
    place_ranks,
    ring_mixing_seconds,
)

INFINITE = replace(
    NETWORK,
    within_gbps=1e18,
    between_gbps=1e18,
    connection_gbps=1e18,
    within_latency_us=0.0,
    between_latency_us=0.0,
)
AT_ONCE = replace(RANK, encoded_elements_per_s=1e18)


def model_of(
    network: Network, fitted: Fitted = CALIBRATION.fitted, rank: RankRates = RANK
) -> CostModel:
    return CostModel(WORKLOAD, Calibration("by hand", rank, network, fitted))


def all_seconds(model: CostModel, num_ranks: int) -> dict[str, float]:
    return {
        "one_bit": one_bit_seconds(model, num_ranks, double_buffering=False),
        "double": one_bit_seconds(model, num_ranks, double_buffering=True),
        "ring": ring_mixing_seconds(model, num_ranks, permuted=False),
        "permuted": ring_mixing_seconds(model, num_ranks, permuted=True),
        "pairs": pairwise_mixing_seconds(model, num_ranks),
        "delayed": delayed_average_seconds(model, num_ranks),
    }


def test_only_those_who_meet_wait() -> None:
    """Of 64 ranks, the slowest delays all who sum, three on a ring, and no pair."""
    model = model_of(INFINITE, Fitted(0.05, 0.0), AT_ONCE)
    waits = {
        name: seconds / model.computing_seconds - 1
        for name, seconds in all_seconds(model, 64).items()
    }
    of_all, of_three = 0.05 * log2(64), 0.05 * log2(3)
    assert waits == pytest.approx(
        {"one_bit": of_all, "double": of_all, "delayed": of_all}
        | {"ring": of_three, "permuted": of_three, "pairs": 0.0},
        abs=1e-9,
    )


def test_at_the_optimal_number_of_ranks_exchanges_are_just_hidden() -> None:
    """At K of eq. (4) half a minibatch takes as long as its exchange (004 2.2)."""
    costs = one_bit_costs(model_of(replace(NETWORK, between_gbps=0.05)), 16)
    num_frames = 16 * WORKLOAD.minibatch_frames
    optimal = costs.optimal_num_ranks(num_frames)
    assert 1 < optimal < 1e6
    assert costs.computation(num_frames / 2, optimal) == pytest.approx(costs.communication)


@pytest.mark.parametrize("all_reduce", ["ring", "direct"])
def test_one_bit_does_not_shorten_latency(all_reduce: str) -> None:
    """An exchange over a link of latency alone takes as long as that of float32.

    Without any latency it takes a 32nd.
    """
    late = replace(INFINITE, between_latency_us=50.0, all_reduce=all_reduce)
    slow = replace(INFINITE, between_gbps=1e-3, connection_gbps=1e-3, all_reduce=all_reduce)
    for network, compression in ((late, 1.0), (slow, 32.0)):
        costs = one_bit_costs(model_of(network, Fitted(0.0, 0.0)), 16)
        placement = place_ranks(16, network)
        exchange = all_reduce_seconds(WORKLOAD.model_bytes, placement, network, 0.0)
        assert costs.communication == pytest.approx(exchange / compression)


def test_ranks_share_the_passes_over_their_stripes() -> None:
    """Over an infinite link 16 ranks take 3 passes over all elements, and 3 over a 16th of them."""
    model = model_of(INFINITE, Fitted(0.0, 0.0))
    pass_s = WORKLOAD.num_parameters / RANK.encoded_elements_per_s
    seconds = one_bit_seconds(model, 16, double_buffering=False)
    assert seconds == pytest.approx(model.computing_seconds + (3 + 3 / 16) * pass_s)


def test_a_slow_link_slows_who_waits_for_it() -> None:
    """On a tenth of the link, what is sent in each step takes ten times as long."""
    slow, slower = (
        model_of(replace(INFINITE, between_gbps=gbps, connection_gbps=gbps), Fitted(0.0, 0.0))
        for gbps in (1e-3, 1e-4)
    )
    before, after = all_seconds(slow, 32), all_seconds(slower, 32)
    for name in ("ring", "permuted", "delayed", "pairs"):
        assert after[name] == pytest.approx(10 * before[name])
    assert before["pairs"] == pytest.approx(before["permuted"] / 2)
    assert before["one_bit"] < before["delayed"] / 10


def test_a_permuted_ring_crosses_hosts() -> None:
    """Neighbours in random order are mostly on other hosts: P ranks of N share their link.

    On hosts of 4 of 16 ranks, 12 of 15 neighbours are elsewhere, so 2 x 4 x 12/15 messages.
    """
    network = replace(INFINITE, ranks_per_host=4, between_gbps=1.0)
    placement = place_ranks(16, network)
    ring, permuted = (
        neighbours_seconds(1e9, placement, network, permuted=each) for each in (False, True)
    )
    assert ring == pytest.approx(8 * 2)
    assert permuted == pytest.approx(8 * 2 * 4 * 12 / 15)


def test_few_ranks_have_few_neighbours() -> None:
    """A rank alone exchanges nothing; two ranks exchange once; a host's ranks on its own links."""
    network = replace(NETWORK, ranks_per_host=4, within_gbps=8.0, within_latency_us=0.0)
    seconds = [
        neighbours_seconds(1e9, place_ranks(size, network), network, permuted=False)
        for size in (1, 2, 4)
    ]
    assert seconds == pytest.approx([0.0, 1.0, 2.0])
