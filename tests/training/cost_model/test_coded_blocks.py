"""Blocks that send the largest parts of their changes: seconds per step, by hand and in limits."""

from dataclasses import replace

import pytest

from tests.training.cost_model.settings import CALIBRATION, NETWORK, RANK, WORKLOAD
from training.algorithms.top_k_lengths import num_message_words
from training.cost_model.step_time import (
    Calibration,
    CostModel,
    Network,
    RankRates,
    coded_block_seconds,
)
from training.settings.trainers import TopK

CODE = TopK(density=0.03)
MESSAGE_BYTES = 4 * num_message_words(1_000_000, CODE)
"""Two bits and a place for each of 30,000 elements: 34 times below the model's 4 MB."""


def model_of(network: Network = NETWORK, rank: RankRates = RANK) -> CostModel:
    return CostModel(WORKLOAD, Calibration("by hand", rank, network, CALIBRATION.fitted))


def block_end(model: CostModel, num_ranks: int, *, by_host: bool) -> float:
    seconds = coded_block_seconds(model, num_ranks, 50, CODE, by_host=by_host)
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
    model = model_of(network, replace(RANK, encoded_elements_per_s=1e7, decoded_words_per_s=1e6))
    assert block_end(model, 8, by_host=False) == pytest.approx(0.1 + 8 * 0.03)
    assert block_end(model, 8, by_host=True) == pytest.approx(0.1 + 2 * 0.03)


def test_the_race_is_won_by_host() -> None:
    """At 20 Mbit/s coded changes by host beat exact models, and those of all ranks."""
    model = model_of(replace(NETWORK, between_gbps=0.02, connection_gbps=0.02))
    by_host = coded_block_seconds(model, 32, 50, CODE, by_host=True)
    assert by_host < coded_block_seconds(model, 32, 50, CODE, by_host=False)
    assert by_host < model.bmuf(32, 50)
