"""Seconds of exchanges and of each trainer's step, by hand and in limits.

The optimal number of ranks of 1-bit SGD is paper 004's equation (4).
"""

import math
from dataclasses import replace
from itertools import pairwise
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.cost_model.settings import CALIBRATION, NETWORK, RANK, WORKLOAD
from training.algorithms.top_k_lengths import num_message_words
from training.cost_model.step_time import (
    CostModel,
    Fitted,
    MinibatchCosts,
    Network,
    Placement,
    RankRates,
    ScalingCalibration,
)
from training.settings.trainers import TopK

MEGABYTE = 1e6


def model_of(
    network: Network = NETWORK, fitted: Fitted = CALIBRATION.fitted, rank: RankRates = RANK
) -> CostModel:
    """Return a model of the same workload on another network."""
    return CostModel(WORKLOAD, ScalingCalibration("by hand", rank, network, fitted))


DIRECT = replace(NETWORK, all_reduce="direct")
RING = replace(NETWORK, all_gather="ring")


def test_ranks_fill_one_host_after_the_other() -> None:
    """A host has all ranks if they are few, else `ranks_per_host`; the last host may have fewer."""
    assert model_of(NETWORK).placed(3) == Placement(3, 3)
    assert model_of(NETWORK).placed(16) == Placement(16, 4)
    assert [model_of(NETWORK).placed(num_ranks).num_hosts for num_ranks in (1, 4, 5, 16)] == [
        1,
        1,
        2,
        4,
    ]


def test_one_connection_is_no_faster_than_its_limit() -> None:
    """Between two hosts of one rank a byte takes 20 ns, though the link itself takes 10 ns."""
    seconds = model_of(NETWORK, Fitted(0.0, 0.0)).all_gather(MEGABYTE, Placement(2, 1))
    assert seconds == pytest.approx(20e-3)


def test_a_ring_passes_each_message_over_one_connection() -> None:
    """A ring has N - 1 turns, each as slow as the slowest hop."""
    assert model_of(RING, Fitted(0.0, 1.0)).all_gather(MEGABYTE, Placement(16, 4)) == pytest.approx(
        15 * 20e-3
    )
    assert model_of(RING, Fitted(0.0, 1.0)).all_gather(MEGABYTE, Placement(4, 4)) == pytest.approx(
        3 * 1e-3
    )


def test_a_two_stage_all_reduce_moves_stripes_directly() -> None:
    """There are two exchanges of a sixteenth of the bytes, 48 of them over each host's link."""
    seconds = model_of(DIRECT, Fitted(0.0, 0.0)).all_reduce(MEGABYTE, Placement(16, 4))
    assert seconds == pytest.approx(2 * (48 * 10e-3 + 3 * 1e-3) / 16)


@pytest.mark.parametrize("network", [NETWORK, DIRECT, RING])
def test_one_rank_exchanges_nothing(network: Network) -> None:
    """Every exchange of a single rank takes 0 s."""
    alone = Placement(1, 1)
    assert model_of(network, Fitted(0.0, 1.0)).all_gather(MEGABYTE, alone) == 0
    assert model_of(network, Fitted(0.0, 1.0)).all_reduce(MEGABYTE, alone) == 0
    assert model_of(network).broadcast(MEGABYTE, alone) == 0


MODEL = CostModel(WORKLOAD, CALIBRATION)


def seconds_by_hand(num_ranks: int, block_size: int) -> dict[str, float]:
    """Compute each trainer's seconds per step on `BUSY` from the papers' and textbooks' counts.

    The model has 4 MB, a message 10,000 words and a header of 4 bytes each; a host has 4 ranks.
    """
    hosts, near = -(-num_ranks // 4), min(num_ranks, 4)
    far = num_ranks - near
    # Each doubling of the ranks adds a wait of half the step's 0.1 s of computing.
    training = 0.1 * (1 + 0.5 * log2(num_ranks))
    # A ring: 2 (N - 1) turns, each with an N-th of the model over the slowest hop.
    turn = 1e-5 + 4e6 / num_ranks * 1e-9 if hosts == 1 else 1e-4 + 4e6 / num_ranks * 20e-9
    ring = 2 * (num_ranks - 1) * turn
    # Messages go directly: from the ranks of the host, and from all others over the host's link,
    # whose every further connection makes it slower by 0.01.
    within = (near - 1) * (1e-5 + 40_004 * 1e-9)
    between = (
        near * far * 40_004 * 10e-9 * (1 + 0.01 * (near * far - 1)) + far * 1e-4 if far else 0.0
    )
    coding = 1e6 / 1e9 + num_ranks * 10_000 / 1e8
    gtc = training + coding + within + between
    return {"synchronous": training + ring, "gtc": gtc, "bmuf": training + ring / block_size}


BUSY = model_of(
    replace(NETWORK, within_latency_us=10.0, between_latency_us=100.0),
    Fitted(waiting=0.5, congestion=0.01),
    replace(RANK, encoded_elements_per_s=1e9, decoded_words_per_s=1e8),
)
ranks_that_fill_hosts = st.sampled_from([1, 2, 3, 4]) | st.integers(2, 50).map(lambda n: 4 * n)


@settings(max_examples=50, deadline=None)
@given(ranks_that_fill_hosts, st.integers(1, 1000))
def test_each_trainers_seconds_are_those_by_hand(num_ranks: int, block_size: int) -> None:
    """Seconds consist of computing, waiting, latency, bytes, congestion and work on messages.

    HTM in groups of one rank is BMUF, and in one group GTC.
    """
    found = {
        "synchronous": BUSY.synchronous(num_ranks),
        "gtc": BUSY.gtc(num_ranks),
        "bmuf": BUSY.bmuf(num_ranks, block_size),
    }
    by_hand = seconds_by_hand(num_ranks, block_size)
    assert found == pytest.approx(by_hand, rel=1e-12)
    assert BUSY.htm(num_ranks, 1, block_size) == pytest.approx(by_hand["bmuf"], rel=1e-12)
    whole = by_hand["bmuf" if num_ranks == 1 else "gtc"]
    assert BUSY.htm(num_ranks, num_ranks, block_size) == pytest.approx(whole, rel=1e-12)


def test_htms_leaders_have_the_hosts_links_to_themselves() -> None:
    """In groups of a whole host there are GTC and a broadcast within it, and one leader a host."""
    message = 4 + 4 * 10_000
    ring, broadcast = 2 * 7 / 8 * 4e6 * 20e-9, 2 * 4e6 * 1e-9
    expected = 0.1 + 3 * message * 1e-9 + (ring + broadcast) / 10
    assert MODEL.htm(32, 4, 10) == pytest.approx(expected)


def test_groups_may_span_whole_hosts() -> None:
    """In groups of two hosts messages cross the link, and every other host has a leader."""
    gather = 3e-9 * 40_004 + 16 * 40_004 * 10e-9
    ring = 2 * 3 / 4 * 4e6 * 20e-9
    broadcast = 4e6 * 20e-9 + 2 * 4e6 * 1e-9
    assert MODEL.htm(32, 8, 10) == pytest.approx(0.1 + gather + (ring + broadcast) / 10)


def test_messages_are_never_longer_than_the_map() -> None:
    """Above 1/16 density two bits an element are shorter than a word an element sent."""
    lengths = [replace(WORKLOAD, density=density).message_bytes for density in (0.01, 0.0625, 0.5)]
    assert lengths == [40_004, 250_004, 250_004]


@pytest.mark.parametrize(
    ("num_ranks", "group_size", "message"),
    [(128, 3, "divisor of 128"), (48, 6, "divisor or a multiple of 4"), (8, 0, "divisor of 8")],
)
def test_unequal_groups_are_refused(num_ranks: int, group_size: int, message: str) -> None:
    """Groups that are unequal, or neither divide nor fill hosts, are refused."""
    with pytest.raises(ValueError, match=message):
        MODEL.htm(num_ranks, group_size, 10)


INFINITE = replace(
    NETWORK,
    within_gbps=1e18,
    between_gbps=1e18,
    connection_gbps=1e18,
    within_latency_us=0.0,
    between_latency_us=0.0,
)
AT_ONCE = replace(RANK, encoded_elements_per_s=1e18)


def all_seconds(model: CostModel, num_ranks: int) -> dict[str, float]:
    return {
        "one_bit": model.one_bit(num_ranks),
        "ring": model.ring_mixing(num_ranks, permuted=False),
        "permuted": model.ring_mixing(num_ranks, permuted=True),
        "pairs": model.pairwise_mixing(num_ranks),
        "delayed": model.delayed_average(num_ranks),
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
        {"one_bit": of_all, "delayed": of_all}
        | {"ring": of_three, "permuted": of_three, "pairs": 0.0},
        abs=1e-9,
    )


def test_at_the_optimal_number_of_ranks_exchanges_are_just_hidden() -> None:
    """At K of eq. (4) half a minibatch takes as long as its exchange (004 2.2)."""
    costs = model_of(replace(NETWORK, between_gbps=0.05)).one_bit_costs(16)
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
        costs = model_of(network, Fitted(0.0, 0.0)).one_bit_costs(16)
        model = model_of(network, Fitted(0.0, 0.0))
        exchange = model.all_reduce(WORKLOAD.model_bytes, model.placed(16))
        assert costs.communication == pytest.approx(exchange / compression)


def test_ranks_share_the_passes_over_their_stripes() -> None:
    """Over an infinite link 16 ranks take 3 passes over all elements, and 3 over a 16th of them."""
    model = model_of(INFINITE, Fitted(0.0, 0.0))
    pass_s = WORKLOAD.num_parameters / RANK.encoded_elements_per_s
    costs = model.one_bit_costs(16)
    seconds = costs.computation(16 * WORKLOAD.minibatch_frames, 16) + costs.communication
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
    model = model_of(network)
    ring, permuted = (
        model.neighbours(1e9, model.placed(16), permuted=each) for each in (False, True)
    )
    assert ring == pytest.approx(8 * 2)
    assert permuted == pytest.approx(8 * 2 * 4 * 12 / 15)


def test_few_ranks_have_few_neighbours() -> None:
    """A rank alone exchanges nothing; two ranks exchange once; a host's ranks on its own links."""
    network = replace(NETWORK, ranks_per_host=4, within_gbps=8.0, within_latency_us=0.0)
    model = model_of(network)
    seconds = [model.neighbours(1e9, model.placed(size), permuted=False) for size in (1, 2, 4)]
    assert seconds == pytest.approx([0.0, 1.0, 2.0])


CODE = TopK(density=0.03)
MESSAGE_BYTES = 4 * num_message_words(1_000_000, CODE)
"""Two bits and a place for each of 30,000 elements: 34 times below the model's 4 MB."""


def block_end(model: CostModel, num_ranks: int, *, by_host: bool) -> float:
    seconds = model.coded_blocks(num_ranks, 50, CODE, by_host=by_host)
    return 50 * (seconds - model.computing_seconds)


def test_each_rank_gets_the_messages_of_all_others() -> None:
    """Of 8 ranks on two hosts: 3 within, at 1 ns a byte, and 16 over the link at 10 ns."""
    expected = (3 * 1e-9 + 16 * 10e-9) * MESSAGE_BYTES
    assert block_end(model_of(), 8, by_host=False) == pytest.approx(expected)


def test_by_host_two_leaders_exchange_and_the_hosts_sum() -> None:
    """A message at one connection's 20 ns a byte; a ring of 4 MB over four, two broadcasts."""
    coded = 20e-9 * MESSAGE_BYTES
    within = 2 * 3 * 1e6 * 1e-9 + 2 * 4e6 * 1e-9
    assert block_end(model_of(), 8, by_host=True) == pytest.approx(coded + within)


def test_decoding_grows_with_those_who_gather() -> None:
    """8 ranks decode 30,000 words each, two leaders a quarter of that; encoding is one pass."""
    network = replace(NETWORK, within_gbps=1e18, between_gbps=1e18, connection_gbps=1e18)
    model = model_of(
        network, rank=replace(RANK, encoded_elements_per_s=1e7, decoded_words_per_s=1e6)
    )
    assert block_end(model, 8, by_host=False) == pytest.approx(0.1 + 8 * 0.03)
    assert block_end(model, 8, by_host=True) == pytest.approx(0.1 + 2 * 0.03)


def test_the_race_is_won_by_host() -> None:
    """At 20 Mbit/s coded changes by host beat exact models, and those of all ranks."""
    model = model_of(replace(NETWORK, between_gbps=0.02, connection_gbps=0.02))
    by_host = model.coded_blocks(32, 50, CODE, by_host=True)
    assert by_host < model.coded_blocks(32, 50, CODE, by_host=False)
    assert by_host < model.bmuf(32, 50)


# Paper 004 5.1 and Table 1 (2048 frames): 118 us a frame, C T_post + T_upd = 18.2 ms, T_upd = 9 ms,
# T_comm^float / 32 = 10 ms.
PAPER = MinibatchCosts(
    frame=118e-6, postprocessing=9.2e-3, model_update=9e-3, exchange=0.32, compression=32.0
)


@pytest.mark.parametrize("num_frames", [1024, 2880, 16384])
def test_computation_takes_as_long_as_communication_at_the_optimum(num_frames: int) -> None:
    """Eq. (3) holds for half a minibatch at the K of eq. (4); the paper's costs give 179."""
    assert PAPER.optimal_num_ranks(2880) == pytest.approx((0.16992 + 0.0092) / 0.001)
    costs = replace(PAPER, model_update=2e-3)
    optimum = costs.optimal_num_ranks(num_frames)
    assert costs.computation(num_frames / 2, optimum) == pytest.approx(costs.communication)


def test_beyond_the_optimum_more_ranks_save_nothing() -> None:
    """Double buffered, a minibatch takes two exchanges from the optimum on, and more before it."""
    costs = replace(PAPER, model_update=2e-3)
    optimum = math.ceil(costs.optimal_num_ranks(2880))
    seconds = [costs.double_buffered_seconds(2880, k) for k in range(1, 3 * optimum)]
    assert seconds[optimum - 1 :] == [2 * costs.communication] * (2 * optimum)
    assert all(before > after for before, after in pairwise(seconds[:optimum]))


def test_without_a_saturated_link_double_buffering_has_no_use() -> None:
    """Section 2.3: below the fixed cost of an update, K is infinite, and one exchange is faster."""
    fast = replace(PAPER, exchange=0.1)
    assert fast.optimal_num_ranks(2880) == math.inf
    for num_ranks in (1, 8, 64):
        alternating = fast.computation(2880, num_ranks) + fast.communication
        assert fast.double_buffered_seconds(2880, num_ranks) > alternating
    slow = replace(PAPER, exchange=0.64)
    alternating = slow.computation(2880, 8) + slow.communication
    assert slow.double_buffered_seconds(2880, 8) < alternating
