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


def model_of(
    network: Network, fitted: Fitted = CALIBRATION.fitted, rank: RankRates = RANK
) -> CostModel:
    """Return a model of the same workload on another network."""
    return CostModel(WORKLOAD, Calibration("by hand", rank, network, fitted))


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
