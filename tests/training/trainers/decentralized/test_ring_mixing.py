"""D-PSGD, RAND-PSGD and D1D-PSGD against their equations, on real and simulated ranks."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.papers.mixing_matrices import ring_matrix, ring_rho, uniform_matrix
from tests.training.trainers.decentralized.mixing_runs import (
    SEED,
    TRAINERS,
    Quadratics,
    Vector,
    Weights,
    distance,
    own_models,
    spread_then_mix,
)
from training.algorithms.mixing import fixed_ring, permuted_ring
from training.distributed.simulated_group import simulate_ranks
from training.trainers import DPsgd

RATE, NUM_STEPS = 0.1, 9


def by_matrices(name: str, num_ranks: int) -> list[Weights]:
    """Return W_1, W_2, ... of eq. (2), (8) or (13) of paper 001, by NumPy."""
    models = means = np.ones((6, num_ranks))
    seen = []
    for step in range(NUM_STEPS):
        ring = (
            permuted_ring(SEED, step, num_ranks) if name == "rand_psgd" else fixed_ring(num_ranks)
        )
        mixing = uniform_matrix(num_ranks) if name == "d1d_psgd" else ring_matrix(ring)
        # D1D's gradient is that of the mean before; the others' is that of the rank's own model.
        places = means if name == "d1d_psgd" else models
        means = models @ mixing
        models = means - RATE * Quadratics(SEED).gradients(places, step)
        seen.append(models)
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2, 7])
@pytest.mark.parametrize("name", ["d_psgd", "rand_psgd", "d1d_psgd"])
def test_ranks_follow_the_equations(name: str, num_ranks: int) -> None:
    """Each rank's model is its column of W_k after every step, and leaving gives the mean."""
    ranks = simulate_ranks(num_ranks, own_models, name, RATE, NUM_STEPS)
    expected = by_matrices(name, num_ranks)
    for rank, (seen, left) in enumerate(ranks):
        for step, model in enumerate(seen):
            np.testing.assert_allclose(model.numpy(), expected[step][:, rank], rtol=1e-12)
        np.testing.assert_allclose(left.numpy(), expected[-1].mean(axis=1), rtol=1e-12)
        assert torch.equal(left, ranks[0][1])


def test_the_mean_of_delayed_averages_is_delayed_sgd() -> None:
    """D1D's mean moves by the mean of gradients taken at the mean one step before (001 eq. 14)."""
    ranks = simulate_ranks(5, own_models, "d1d_psgd", RATE, NUM_STEPS)
    before = now = np.ones(6)
    for step in range(NUM_STEPS):
        places = np.repeat(before[:, None], 5, axis=1)
        gradient = Quadratics(SEED).gradients(places, step).mean(axis=1)
        before, now = now, now - RATE * gradient
        mean_model = np.stack([seen[step].numpy() for seen, _ in ranks]).mean(axis=0)
        np.testing.assert_allclose(mean_model, now, rtol=1e-12)


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_a_ring_contracts_by_rho(num_ranks: int) -> None:
    """From the slowest eigenvector, D-PSGD's distance shrinks by eq. (6)'s rho in each round."""
    waves = np.cos(2 * np.pi * np.arange(num_ranks) / num_ranks)[None, :]
    models = simulate_ranks(num_ranks, spread_then_mix, DPsgd, waves, 4)
    distances = [distance([seen[k] for seen in models]) for k in range(5)]
    ratios = [after / before for before, after in pairwise(distances)]
    assert ratios == pytest.approx([ring_rho(num_ranks)] * 4, rel=1e-9)


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_mixing_keeps_the_mean(name: str) -> None:
    """Ten rounds without gradients move the mean of 8 models by rounding alone."""
    first = np.random.default_rng(3).normal(size=(4, 8))
    models = simulate_ranks(8, spread_then_mix, TRAINERS[name], first, 10)
    mean_model = torch.stack([seen[-1] for seen in models]).mean(0).numpy()
    np.testing.assert_allclose(mean_model, first.mean(axis=1), atol=1e-14)


def evaluate_between(group: ProcessGroup, name: str, is_evaluated: bool) -> tuple[Tensor, Tensor]:
    """Train, with the mean model asked for after each step or never."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    means = [torch.zeros(6, dtype=torch.float64)]
    trainer = TRAINERS[name](model, optimizer, group=group)
    with trainer:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            optimizer.step()
            if is_evaluated:
                means.append(trainer.mean_model()["weights"])
    return model.weights.detach(), means[-1]


@pytest.mark.parametrize("name", ["d_psgd", "rand_psgd", "d1d_psgd"])
def test_the_mean_model_is_had_without_stopping(name: str) -> None:
    """It is what leaving would give, on all ranks, and the training has the same bits with it."""
    without = simulate_ranks(4, evaluate_between, name, False)
    for (left, mean_model), (expected, _) in zip(
        simulate_ranks(4, evaluate_between, name, True), without, strict=True
    ):
        assert torch.equal(left, expected)
        assert torch.equal(mean_model, left)
