"""Bytes that leave a rank in a step, by paper 001's Table 1: two models for each trainer."""

import pytest
import torch

from tests.training.trainers.decentralized.mixing_runs import (
    NUM_WEIGHTS,
    SEED,
    TRAINERS,
    Quadratics,
    Vector,
)
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks

pytestmark = pytest.mark.chaos

NUM_STEPS = 8  # fewer than trainers take between two comparisons of their replicas
BYTES_PER_WEIGHT = 8


def models_sent(group: SimulatedGroup, name: str) -> float:
    """Return the models that leave this rank in a step, on the mean of the steps."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with TRAINERS[name](model, optimizer, group=group) as trainer:
        before = trainer.wire_bytes
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            group.advance(1.0)
            optimizer.step()
        sent = trainer.wire_bytes - before
    return sent / NUM_STEPS / (BYTES_PER_WEIGHT * NUM_WEIGHTS)


@pytest.mark.parametrize("num_ranks", [8, 16, 64])
def test_a_ring_sends_two_models_whatever_its_length(num_ranks: int) -> None:
    """D-PSGD and RAND-PSGD send their model to both neighbours."""
    for name in ("d_psgd", "rand_psgd"):
        assert simulate_ranks(num_ranks, models_sent, name) == [2.0] * num_ranks


@pytest.mark.parametrize("num_ranks", [8, 16, 64])
def test_a_sum_sends_almost_two_models(num_ranks: int) -> None:
    """D1D-PSGD's all-reduce sends 2 (L - 1) / L models, down to whole bytes."""
    a_byte = 1 / (BYTES_PER_WEIGHT * NUM_WEIGHTS)
    for sent in simulate_ranks(num_ranks, models_sent, "d1d_psgd"):
        assert sent == pytest.approx(2 * (num_ranks - 1) / num_ranks, abs=a_byte)


@pytest.mark.parametrize("num_ranks", [8, 16, 64])
def test_a_pair_sends_a_model_each_way(num_ranks: int) -> None:
    """AD-PSGD's active half asks once a step: a model a rank on the mean, where Table 1 has two.

    The head of a message is a tenth of these six weights.
    """
    sent = simulate_ranks(num_ranks, models_sent, "ad_psgd")
    assert all(each > 0 for each in sent)
    assert 1.0 <= sum(sent) / num_ranks < 1.1
