"""Slow ranks in virtual time: who waits for whom, in each decentralized trainer."""

import random
from statistics import mean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.training.trainers.decentralized.mixing_runs import SEED, TRAINERS, Quadratics, Vector
from training.algorithms.mixing import fixed_ring, permuted_ring
from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.trainers.trainer import STEPS_BETWEEN_COMPARISONS

pytestmark = pytest.mark.chaos

NUM_RANKS, NUM_STEPS = 12, 24
NUM_COMPARED, NUM_LOOKED_AT = 36, 68
"""Steps after one comparison of replicas, and after a second one, when the first is looked at."""
STALL_S, STALLS = 9.0, 1 / 24


def seconds(group: SimulatedGroup, name: str, step_s: np.ndarray) -> float:
    """Return a rank's virtual seconds, where `step_s[rank, step]` is what its steps take."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with TRAINERS[name](model, optimizer, group=group):
        start = group.now()
        for step, own_s in enumerate(step_s[group.rank()]):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            group.advance(float(own_s))
            optimizer.step()
        return group.now() - start


def at_random(num_steps: int = NUM_STEPS) -> np.ndarray:
    """Return steps of 1 s of which each rank stalls about every 24th, for 9 s more."""
    stalls = [
        [random.Random(f"1/{rank}/{step}").random() < STALLS for step in range(num_steps)]
        for rank in range(NUM_RANKS)
    ]
    return 1.0 + STALL_S * np.array(stalls)


def rank_0_always(num_steps: int = NUM_STEPS) -> np.ndarray:
    step_s = np.ones((NUM_RANKS, num_steps))
    step_s[0] += STALL_S
    return step_s


def test_random_stalls_cost_less_the_fewer_ranks_meet() -> None:
    """Pairs that do not wait lose their own stalls alone, a ring its neighbourhood's, a sum all.

    12 ranks that stall once each in 24 steps delay D1D in some 40 % of its steps.
    """
    pairs, permuted, ring, delayed = (
        mean(simulate_ranks(NUM_RANKS, seconds, name, at_random()))
        for name in ("ad_psgd", "rand_psgd", "d_psgd", "d1d_psgd")
    )
    assert pairs < 0.8 * ring
    assert ring < 0.95 * delayed
    assert permuted < 0.95 * delayed


def test_a_rank_that_is_always_slow_slows_all_but_pairs() -> None:
    """Neighbours wait in each round, so in the end rings and sums go at the slowest rank's pace.

    RAND-PSGD gains nothing but its lag: a slow rank's delay reaches all in some log_3 L rounds. On
    the fixed ring far ranks are ahead by one step for each rank between, no more. AD-PSGD's are at
    their own pace until they look at a comparison of replicas, which finds ranks that stopped.
    """
    own = simulate_ranks(NUM_RANKS, seconds, "ad_psgd", rank_0_always(NUM_COMPARED))
    assert own[1:] == pytest.approx([NUM_COMPARED] * (NUM_RANKS - 1))
    looked_at = simulate_ranks(NUM_RANKS, seconds, "ad_psgd", rank_0_always(NUM_LOOKED_AT))
    assert min(looked_at) > STEPS_BETWEEN_COMPARISONS * (1 + STALL_S)
    found = {
        name: simulate_ranks(NUM_RANKS, seconds, name, rank_0_always())
        for name in ("d_psgd", "rand_psgd", "d1d_psgd")
    }
    for ranks in found.values():
        assert min(ranks) > (NUM_STEPS - NUM_RANKS / 2 - 1) * (1 + STALL_S)
    assert 0.9 * mean(found["d1d_psgd"]) < mean(found["rand_psgd"]) < mean(found["d1d_psgd"])


def test_comparisons_delay_pairs_hardly_by_random_stalls() -> None:
    """In 96 steps ranks stall four times each, and lose 9 s a stall and a few seconds more.

    They look at a comparison 32 steps after it. When they did a step after it, they lost 38 s.
    """
    step_s = at_random(3 * STEPS_BETWEEN_COMPARISONS)
    own = step_s.sum() / NUM_RANKS
    assert own <= mean(simulate_ranks(NUM_RANKS, seconds, "ad_psgd", step_s)) < own + STALL_S


NUM_FEW = 5


def expected_seconds(name: str, stalls: np.ndarray, latency_s: float) -> np.ndarray:
    """Return each rank's seconds, if it waits for the models of its round's neighbours alone.

    The gradient of step k is computed beside round k, which began with the end of step k - 1: a
    rank ends step k once it has its gradient, and its neighbours' models of the end of k - 1.
    """
    ends = np.zeros(NUM_RANKS)
    for step in range(NUM_FEW):
        ring = (
            permuted_ring(SEED, step, NUM_RANKS) if name == "rand_psgd" else fixed_ring(NUM_RANKS)
        )
        arrived = [max(ends[list(ring.neighbours(rank))]) + latency_s for rank in range(NUM_RANKS)]
        ends = np.maximum(ends + stalls[:, step], arrived)
    return ends


@given(
    st.sampled_from(["d_psgd", "rand_psgd"]),
    arrays(np.float64, (NUM_RANKS, NUM_FEW), elements=st.sampled_from([1.0, 2.0, 8.0])),
    st.sampled_from([0.0, 0.5, 4.0]),
)
@settings(max_examples=4)
def test_a_rank_waits_for_its_rounds_neighbours_and_no_more(
    name: str, stalls: np.ndarray, latency_s: float
) -> None:
    """Virtual times are those of the recursion in which a rank waits for two models a round.

    RAND-PSGD's are at most D1D-PSGD's: where all wait for all, each has neighbours among them.
    """
    link = SimulatedLink(latency_s=latency_s)
    found = simulate_ranks(NUM_RANKS, seconds, name, stalls, link=link)
    assert found == pytest.approx(expected_seconds(name, stalls, latency_s))
    if latency_s == 0:
        delayed = simulate_ranks(NUM_RANKS, seconds, "d1d_psgd", stalls)
        assert all(one <= other for one, other in zip(found, delayed, strict=True))
