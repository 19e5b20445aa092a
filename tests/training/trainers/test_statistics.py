"""Trainers say in numbers what they do."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, sgd, small_model, take_step
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Bmuf, Gtc, Htm, OneBit, Synchronous, Trainer
from training.trainers.trainer import Statistics, between

NUM_STEPS = 7
NUM_ELEMENTS = 66
WORD_BYTES = 4


def train(
    group: ProcessGroup, make: type[Trainer], settings: dict[str, Any]
) -> tuple[list[Statistics], dict[str, Any]]:
    """The statistics before each step and after the last, and the state at the end."""
    model = small_model()
    optimizer = sgd(model, 0.0 if make is OneBit else 0.9)
    found = []
    with make(model, optimizer, group=group, **settings) as trainer:
        for step in range(NUM_STEPS):
            found.append(trainer.statistics())
            take_step(model, optimizer, step, group.rank())
        found.append(trainer.statistics())
        return found, trainer.state_dict()


def test_synchronous_sends_every_gradient() -> None:
    """Each rank gives 4 bytes an element to each step's sum; alone, nothing is sent."""
    (found, _), *_ = simulate_ranks(2, train, Synchronous, {})
    for step, statistics in enumerate(found):
        expected = step * WORD_BYTES * NUM_ELEMENTS
        assert statistics == {"num_steps": step, "bytes_sent": expected}
    ((found, _),) = simulate_ranks(1, train, Synchronous, {})
    assert found[-1]["bytes_sent"] == 0


def test_gtc_counts_what_it_sends() -> None:
    """Density and bytes are those of the messages; the norm is that of the residual in the state.

    Nothing that checks or saves counts.
    """
    for found, state in simulate_ranks(2, train, Gtc, {"gradient_threshold": 1 / 16}):
        last = found[-1]
        assert last["num_elements"] == NUM_STEPS * NUM_ELEMENTS
        assert last["density"] == last["num_elements_sent"] / last["num_elements"]
        assert 0.05 < last["density"] < 0.95
        residual = torch.cat([each.reshape(-1) for each in state["residuals"].values()])
        assert last["residual_norm"] == pytest.approx(float(residual.norm()))
        words = [
            2
            + min(
                step["num_elements_sent"], 2 * 3
            )  # above 6 elements a map of two planes is shorter
            for step in (between(*pair) for pair in pairwise(found))
        ]
        assert last["bytes_sent"] == WORD_BYTES * sum(words)


@pytest.mark.parametrize("double_buffering", [False, True])
def test_one_bit_counts_both_stages(double_buffering: bool) -> None:
    """Each step's messages, also of an exchange under way; the norms of both residuals.

    A message has two words for each column (7 of five elements, 3 of seven, two biases) and bits.
    """
    ranks = simulate_ranks(2, train, OneBit, {"double_buffering": double_buffering})
    words = 0
    for found, state in ranks:
        residual = torch.cat([each.reshape(-1) for each in state["residuals"].values()])
        assert found[-1]["residual_norm"] == pytest.approx(float(residual.norm()))
        stripe_norm = float(state["stripe_residual"].norm())
        assert found[-1]["stripe_residual_norm"] == pytest.approx(stripe_norm)
        assert stripe_norm > 0
        sent = [after["bytes_sent"] - before["bytes_sent"] for before, after in pairwise(found)]
        assert len(set(sent)) == 1
        words += sent[0] // WORD_BYTES
    # Stripes have 35 and 31 elements, so two words of bits and one; both are sent in both stages.
    assert words == 2 * (2 * (7 + 1 + 3 + 1) + 2 + 1)


@pytest.mark.parametrize("block_size", [2, 3])
def test_bmuf_counts_blocks(block_size: int) -> None:
    """A block's end gives the model to the mean; the norm is that of the update in the state."""
    for found, state in simulate_ranks(2, train, Bmuf, {"block_size": block_size}):
        update = torch.cat([each.reshape(-1) for each in state["update"].values()])
        num_blocks = NUM_STEPS // block_size
        assert found[-1] == {
            "num_steps": NUM_STEPS,
            "bytes_sent": num_blocks * WORD_BYTES * NUM_ELEMENTS,
            "num_blocks": num_blocks,
            "block_update_norm": pytest.approx(float(update.norm())),
            "block_residual_norm": 0.0,
        }
        assert state["num_blocks"] == num_blocks


def test_htm_counts_both_tiers() -> None:
    """A group's leader averages with others and sends the mean to its group; others send less."""
    settings = {"group_size": 2, "block_size": 3, "gradient_threshold": 1 / 16}
    ranks = [found[-1] for found, _ in simulate_ranks(4, train, Htm, settings)]
    model_bytes = WORD_BYTES * NUM_ELEMENTS
    alone = [found[-1] for found, _ in simulate_ranks(4, train, Htm, settings | {"block_size": 99})]
    assert [rank["num_blocks"] for rank in ranks] == [2] * 4
    for rank, statistics in enumerate(ranks):
        of_gradients = statistics["bytes_sent"] - 2 * model_bytes * 2 * (rank % 2 == 0)
        assert of_gradients <= WORD_BYTES * NUM_STEPS * (2 + 6)
        assert statistics["block_update_norm"] > 0 == alone[rank]["block_update_norm"]
        assert 0 < statistics["density"] < 1


def test_real_ranks_count_as_simulated_ones(rank_pool: RankPool) -> None:
    """The gather may pad a message, which is counted as it was made."""
    settings = {"group_size": 2, "block_size": 3, "gradient_threshold": 1 / 16}
    of_gtc = {"gradient_threshold": 1 / 16}
    for make, its in ((Htm, settings), (Gtc, of_gtc), (OneBit, {"double_buffering": True})):
        real = [found for found, _ in rank_pool.run(4, train, make, its)]
        assert real == [found for found, _ in simulate_ranks(4, train, make, its)]
