"""Slow ranks in virtual time: who waits for whom, in each decentralized trainer."""

import random
from statistics import mean

import pytest
import torch

from tests.training.trainers.decentralized.mixing_runs import SEED, TRAINERS, Quadratics, Vector
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks

NUM_RANKS, NUM_STEPS = 12, 24
STALL_S, STALLS = 9.0, 1 / 24


def seconds(group: SimulatedGroup, name: str, seed: int | None) -> float:
    """Return a rank's virtual seconds: a step takes 1 s, and a stall 9 s more.

    Each rank stalls at random about once, or, without a seed, rank 0 in every step.
    """
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with TRAINERS[name](model, optimizer, group=group):
        start = group.now()
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            if seed is None:
                is_stalled = group.rank() == 0
            else:
                is_stalled = random.Random(f"{seed}/{group.rank()}/{step}").random() < STALLS
            group.advance(1.0 + STALL_S * is_stalled)
            optimizer.step()
        return group.now() - start


def mean_seconds(name: str, seed: int | None) -> float:
    return mean(simulate_ranks(NUM_RANKS, seconds, name, seed))


@pytest.mark.parametrize("seed", [1])
def test_random_stalls_cost_less_the_fewer_ranks_meet(seed: int) -> None:
    """Pairs that do not wait lose their own stalls alone, a ring its neighbourhood's, a sum all.

    12 ranks that stall once each in 24 steps delay D1D in some 40 % of its steps.
    """
    pairs, permuted, ring, delayed = (
        mean_seconds(name, seed) for name in ("ad_psgd", "rand_psgd", "d_psgd", "d1d_psgd")
    )
    assert pairs < 0.8 * ring
    assert ring < 0.95 * delayed
    assert permuted < 0.95 * delayed


def test_a_rank_that_is_always_slow_slows_all_but_pairs() -> None:
    """Neighbours wait in each round, so in the end rings and sums go at the slowest rank's pace.

    A fixed ring's far ranks are ahead by one step for each rank between, no more.
    """
    own = simulate_ranks(NUM_RANKS, seconds, "ad_psgd", None)
    assert own[1:] == pytest.approx([NUM_STEPS] * (NUM_RANKS - 1))
    for name in ("d_psgd", "rand_psgd", "d1d_psgd"):
        ranks = simulate_ranks(NUM_RANKS, seconds, name, None)
        assert min(ranks) > (NUM_STEPS - NUM_RANKS / 2 - 1) * (1 + STALL_S)
