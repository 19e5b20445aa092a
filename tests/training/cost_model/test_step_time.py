"""Check the limits of each trainer's step time: linear, equal to another's, or ever worse."""

from dataclasses import replace
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.cost_model.settings import CALIBRATION, NETWORK, RANK, WORKLOAD
from training.cost_model.step_time import (
    Calibration,
    CostModel,
    Fitted,
    Network,
    RankRates,
    Workload,
)

MODEL = CostModel(WORKLOAD, CALIBRATION)
INFINITE = replace(
    NETWORK, within_gbps=1e18, between_gbps=1e18, connection_gbps=1e18, all_gather="ring"
)


def model_of(
    network: Network, fitted: Fitted = CALIBRATION.fitted, rank: RankRates = RANK
) -> CostModel:
    """Return a model of the same workload on another network."""
    return CostModel(WORKLOAD, Calibration("by hand", rank, network, fitted))


def all_speed_ups(model: CostModel, num_ranks: int) -> list[float]:
    """Return the speed-ups of the four trainers, in groups of four and blocks of ten."""
    seconds = (
        model.synchronous(num_ranks),
        model.gtc(num_ranks),
        model.bmuf(num_ranks, 10),
        model.htm(num_ranks, min(num_ranks, 4), 10),
    )
    return [model.speed_up(num_ranks, each) for each in seconds]


def test_one_rank_is_as_fast_as_itself() -> None:
    """If encoding takes no time, the speed-up of one rank is 1 for every trainer."""
    assert all_speed_ups(MODEL, 1) == pytest.approx([1.0] * 4)
    assert MODEL.computing_seconds == pytest.approx(0.1)


@pytest.mark.parametrize("num_ranks", [4, 32, 128])
def test_an_infinite_link_makes_every_trainer_linear(num_ranks: int) -> None:
    """Without latency, work on messages or waiting, N ranks are N times as fast."""
    assert all_speed_ups(model_of(INFINITE), num_ranks) == pytest.approx([num_ranks] * 4)


def test_waiting_remains_on_an_infinite_link() -> None:
    """Each doubling of the ranks costs every trainer the same share of the step's computing."""
    waiting = model_of(INFINITE, Fitted(waiting=0.05, congestion=1.0))
    assert all_speed_ups(waiting, 32) == pytest.approx([32 / (1 + 0.05 * log2(32))] * 4)


def test_endless_blocks_make_bmuf_linear() -> None:
    """An exchange once in an endless block costs a step nothing."""
    assert MODEL.speed_up(128, MODEL.bmuf(128, 10**12)) == pytest.approx(128)
    assert MODEL.speed_up(128, MODEL.bmuf(128, 10)) < 112


def test_endless_blocks_make_htm_its_groups_gtc() -> None:
    """In endless blocks a step of HTM costs what a step of GTC in one group costs."""
    assert MODEL.htm(128, 4, 10**12) == pytest.approx(MODEL.gtc(4))


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
    """Seconds consist of computing, waiting, latency, bytes, congestion and work on messages."""
    found = {
        "synchronous": BUSY.synchronous(num_ranks),
        "gtc": BUSY.gtc(num_ranks),
        "bmuf": BUSY.bmuf(num_ranks, block_size),
    }
    assert found == pytest.approx(seconds_by_hand(num_ranks, block_size), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(ranks_that_fill_hosts, st.integers(1, 1000))
def test_groups_of_one_rank_are_bmuf(num_ranks: int, block_size: int) -> None:
    """HTM in groups of one rank exchanges no gradients: only the ring, once a block."""
    by_hand = seconds_by_hand(num_ranks, block_size)["bmuf"]
    assert BUSY.htm(num_ranks, 1, block_size) == pytest.approx(by_hand, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(ranks_that_fill_hosts, st.integers(1, 1000))
def test_one_group_is_gtc(num_ranks: int, block_size: int) -> None:
    """HTM in one group filters no block: it sends messages, or none if it has one rank."""
    trainer = "bmuf" if num_ranks == 1 else "gtc"
    by_hand = seconds_by_hand(num_ranks, block_size)[trainer]
    assert BUSY.htm(num_ranks, num_ranks, block_size) == pytest.approx(by_hand, rel=1e-12)


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


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([4, 8, 16, 64, 128]), st.floats(0.01, 100), st.floats(1.0, 100.0))
def test_more_bandwidth_never_slows_a_trainer(num_ranks: int, gbps: float, factor: float) -> None:
    """Speed-up is monotonic in the link between hosts."""
    slow = replace(NETWORK, between_gbps=gbps, connection_gbps=gbps)
    fast = replace(slow, between_gbps=factor * gbps, connection_gbps=factor * gbps)
    fitted = Fitted(waiting=0.05, congestion=0.01)
    pairs = zip(
        all_speed_ups(model_of(slow, fitted), num_ranks),
        all_speed_ups(model_of(fast, fitted), num_ranks),
        strict=True,
    )
    assert all(before <= after * (1 + 1e-12) for before, after in pairs)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 60), st.floats(1e-6, 1e-1), st.floats(0.01, 100))
def test_without_congestion_twice_the_hosts_hardly_slow_gtc(
    num_hosts: int, density: float, gbps: float
) -> None:
    """Costs that are linear in the ranks cannot halve a speed-up, as it does in the papers.

    From 8 to 16 hosts they take 7 % of it at most: the share of messages from other hosts grows.
    """
    network = replace(NETWORK, between_gbps=gbps, connection_gbps=gbps, between_latency_us=50.0)
    rank = replace(RANK, decoded_words_per_s=1e8)
    workload = replace(WORKLOAD, density=density)
    model = CostModel(workload, replace(CALIBRATION, rank=rank, network=network))
    fewer, more = 4 * num_hosts, 8 * num_hosts
    kept = model.speed_up(more, model.gtc(more)) / model.speed_up(fewer, model.gtc(fewer))
    assert kept >= 2 * (num_hosts - 1) / (2 * num_hosts - 1) * (1 - 1e-12)


def test_messages_are_worked_on_by_every_rank() -> None:
    """The time of encoding grows with the model, that of decoding with the ranks."""
    rates = RankRates(1000.0, 1_000_000, encoded_elements_per_s=1e7, decoded_words_per_s=1e6)
    model = CostModel(WORKLOAD, replace(CALIBRATION, rank=rates, network=INFINITE))
    assert model.gtc(4) == pytest.approx(0.1 + 0.1 + 4 * 0.01)


def test_messages_are_never_longer_than_the_map() -> None:
    """Above 1/16 density two bits an element are shorter than a word an element sent."""
    lengths = [replace(WORKLOAD, density=density).message_bytes for density in (0.01, 0.0625, 0.5)]
    assert lengths == [40_004, 250_004, 250_004]


def test_a_larger_model_takes_longer_in_proportion() -> None:
    """A model with twice the parameters takes half the frames a second."""
    doubled = CostModel(replace(WORKLOAD, num_parameters=2_000_000), CALIBRATION)
    assert doubled.computing_seconds == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("num_ranks", "group_size", "message"),
    [(128, 3, "divisor of 128"), (48, 6, "divisor or a multiple of 4"), (8, 0, "divisor of 8")],
)
def test_unequal_groups_are_refused(num_ranks: int, group_size: int, message: str) -> None:
    """Groups that are unequal, or neither divide nor fill hosts, are refused."""
    with pytest.raises(ValueError, match=message):
        MODEL.htm(num_ranks, group_size, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"density": 2.0}, r"density = 2.0: need 0..1"),
        ({"num_parameters": 0}, "need at least 1"),
        ({"minibatch_frames": 0}, "need at least 1"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, float], message: str) -> None:
    """Values out of range are refused, and the message gives the bound."""
    with pytest.raises(ValueError, match=message):
        Workload(**{"num_parameters": 10, "minibatch_frames": 10, "density": 0.1, **changes})


def test_impossible_calibrations_are_refused() -> None:
    """Rates that are not positive and fitted costs below 0 are refused."""
    with pytest.raises(ValueError, match=r"frames_per_s = 0.0: need 1e-09\.\.1e\+18"):
        replace(RANK, frames_per_s=0.0)
    with pytest.raises(ValueError, match=r"between_gbps = -1.0: need 1e-09\.\."):
        replace(NETWORK, between_gbps=-1.0)
    with pytest.raises(ValueError, match=r"waiting = -0.1: need 0\.\.1000"):
        Calibration("by hand", RANK, NETWORK, Fitted(waiting=-0.1, congestion=0.0))
