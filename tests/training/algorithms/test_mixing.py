"""Mixing of decentralized SGD: neighbours and partners, matrices and their rates, and updates.

Equations are those of paper 001.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.papers.mixing_matrices import (
    pair_matrix,
    permuted_ring_distance,
    ring_matrix,
    uniform_matrix,
)
from training.algorithms.mixing import (
    Ring,
    drawn_partner,
    exchanged_weights,
    fixed_ring,
    is_active,
    mixed_weights,
    partners,
    permuted_ring,
)

SEEDS = st.integers(0, 2**63)
COUNTERS = st.integers(0, 10**12)
SIZES = st.integers(1, 128)


def test_the_permutation_is_a_stated_function_of_seed_and_round() -> None:
    """These are the orders of seed 7 and of a large seed, whatever machine and NumPy version."""
    assert [permuted_ring(7, round_index, 8).order for round_index in range(4)] == [
        (7, 2, 3, 5, 0, 4, 6, 1),
        (2, 6, 5, 7, 1, 0, 4, 3),
        (3, 2, 5, 4, 0, 6, 7, 1),
        (6, 7, 4, 2, 5, 1, 3, 0),
    ]
    assert permuted_ring(2**63, 10**12, 3).order == (0, 2, 1)
    assert permuted_ring(0, 0, 1).order == (0,)


def test_a_drawn_partner_is_a_stated_function() -> None:
    """These are the first partners of rank 2 of eight with seed 7, whatever the machine."""
    drawn = [drawn_partner(7, 2, exchange_index, 8) for exchange_index in range(10)]
    assert drawn == [3, 3, 3, 1, 1, 1, 3, 1, 3, 3]


def chi_squared(counts: Counter[object], num_cells: int) -> float:
    """Return the statistic of equally probable cells."""
    expected = counts.total() / num_cells
    missing = (num_cells - len(counts)) * expected
    return missing + sum((count - expected) ** 2 / expected for count in counts.values())


def test_permutations_are_uniform() -> None:
    """6,000 rounds of four ranks: chi squared of 24 cells is below its 99.9 % point, 49.7."""
    counts = Counter[object](permuted_ring(1, round_index, 4).order for round_index in range(6000))
    assert counts.keys() == set(permutations(range(4)))
    assert chi_squared(counts, 24) < 49.7


def test_successive_rounds_and_seeds_are_independent() -> None:
    """Pairs of three ranks' orders: chi squared of 36 cells is below its 99.9 % point, 66.6."""
    rounds = Counter[object](
        (permuted_ring(1, index, 3), permuted_ring(1, index + 1, 3)) for index in range(0, 7200, 2)
    )
    seeds = Counter[object](
        (permuted_ring(seed, 5, 3), permuted_ring(seed + 1, 5, 3)) for seed in range(0, 7200, 2)
    )
    assert chi_squared(rounds, 36) < 66.6
    assert chi_squared(seeds, 36) < 66.6


@given(SEEDS, COUNTERS, SIZES)
def test_neighbours_are_mutual(seed: int, round_index: int, num_ranks: int) -> None:
    """A rank receives from just the ranks to which it sends, and it is none of them."""
    ring = permuted_ring(seed, round_index, num_ranks)
    for rank in range(num_ranks):
        neighbours = ring.neighbours(rank)
        assert len(neighbours) == min(num_ranks - 1, 2)
        assert rank not in neighbours
        assert all(rank in ring.neighbours(other) for other in neighbours)


@pytest.mark.parametrize(
    ("order", "neighbours"),
    [
        ((0,), {0: ()}),
        ((1, 0), {0: (1,), 1: (0,)}),
        ((0, 1, 2), {0: (1, 2), 1: (0, 2), 2: (0, 1)}),
        ((2, 0, 3, 1), {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}),
    ],
)
def test_neighbours_are_left_and_right(
    order: tuple[int, ...], neighbours: dict[int, tuple[int, ...]]
) -> None:
    """Rings of one and of two ranks have fewer neighbours; the ends of the order meet."""
    ring = Ring(order)
    assert {rank: ring.neighbours(rank) for rank in order} == neighbours


@given(SIZES)
def test_waiting_never_forms_a_cycle(num_ranks: int) -> None:
    """Only active ranks wait, and for passive ones alone: waiting has no path of two edges."""
    for rank in range(num_ranks):
        for partner in partners(rank, num_ranks):
            assert is_active(rank) != is_active(partner)
            assert rank in partners(partner, num_ranks)


@given(SIZES)
def test_pairs_connect_all_ranks(num_ranks: int) -> None:
    """Models reach every rank: even rings keep all their edges, odd ones lose the closing one."""
    reached, last = {0}, {0}
    while last:
        last = {other for rank in last for other in partners(rank, num_ranks)} - reached
        reached |= last
    assert reached == set(range(num_ranks))
    num_edges = sum(len(partners(rank, num_ranks)) for rank in range(num_ranks)) // 2
    closing = num_ranks > 2 and num_ranks % 2 == 0
    assert num_edges == num_ranks - 1 + closing
    ring = fixed_ring(num_ranks)
    for rank in range(num_ranks):
        assert set(partners(rank, num_ranks)) <= set(ring.neighbours(rank))


@given(SEEDS, st.integers(0, 63), COUNTERS, st.integers(2, 128))
def test_a_drawn_partner_is_a_passive_neighbour(
    seed: int, half: int, exchange_index: int, num_ranks: int
) -> None:
    """Each active rank finds one, with two ranks and on odd rings, too."""
    rank = 2 * half % (num_ranks - num_ranks % 2)
    partner = drawn_partner(seed, rank, exchange_index, num_ranks)
    assert partner in partners(rank, num_ranks)
    assert not is_active(partner)


def test_partners_are_drawn_equally_and_apart_from_other_ranks() -> None:
    """Of 4,000 exchanges 2,000 are with either side, within 4 standard errors, 127; so are the
    exchanges in which two ranks draw the same side."""
    draws = {
        rank: [drawn_partner(1, rank, index, 8) > rank for index in range(4000)] for rank in (2, 4)
    }
    same = [mine == other for mine, other in zip(draws[2], draws[4], strict=True)]
    for outcomes in (draws[2], draws[4], same):
        assert abs(sum(outcomes) - 2000) < 127
    assert drawn_partner(1, 2, 3999, 8) == (3 if draws[2][3999] else 1)


def test_the_ring_is_eq_3() -> None:
    """Five ranks: thirds on the diagonal, beside it and in two corners."""
    expected = [[1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 0, 0, 1, 1]]
    assert np.array_equal(ring_matrix(fixed_ring(5)), np.array(expected) / 3)


def test_a_permuted_ring_is_eq_8() -> None:
    """P^T T_0 P, where row i of P has its 1 at the rank of the ring's place i."""
    ring = permuted_ring(3, 5, 9)
    permuting = np.eye(9)[list(ring.order)]
    expected = permuting.T @ ring_matrix(fixed_ring(9)) @ permuting
    assert np.array_equal(ring_matrix(ring), expected)


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(8, 2), (8, 3), (16, 4), (32, 2)])
def test_drawn_rings_follow_eq_11(num_ranks: int, num_rounds: int) -> None:
    """500 runs of successive rounds: their mean is eq. (11) within 4 standard errors.

    A standard error is at most 3 % of eq. (11), without whose -2 / (3 (L - 1)) the value is 2.7
    times as large for 8 ranks and 3 rounds.
    """
    uniform = uniform_matrix(num_ranks)
    squares = []
    for run in range(500):
        mixed = np.eye(num_ranks)
        for round_index in range(run * num_rounds, (run + 1) * num_rounds):
            mixed = mixed @ ring_matrix(permuted_ring(11, round_index, num_ranks))
        squares.append(np.linalg.norm(mixed - uniform) ** 2)
    expected = permuted_ring_distance(num_ranks, num_rounds)
    error = np.std(squares, ddof=1) / np.sqrt(len(squares))
    assert error <= 0.03 * expected
    assert abs(np.mean(squares) - expected) <= 4 * error + 1e-12


SMALL_SEEDS = st.integers(0, 2**32)
NUM_ELEMENTS = 4
UNIT_ROUNDOFF = Fraction(1, 2**24)


def mixed_by(ring: Ring, models: Sequence[Tensor]) -> list[Tensor]:
    """Return every rank's mixed weights."""
    return [
        mixed_weights({other: models[other] for other in (rank, *ring.neighbours(rank))})
        for rank in range(len(models))
    ]


def random_models(num_ranks: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(num_ranks, NUM_ELEMENTS, dtype=dtype, generator=generator))


def stacked(models: Sequence[Tensor]) -> np.ndarray:
    """Return W, a column for each rank."""
    return torch.stack(list(models), dim=1).numpy()


FLOATS = st.floats(-1e6, 1e6, width=32).filter(lambda value: value == 0 or abs(value) > 1e-30)


@given(st.lists(FLOATS, min_size=1, max_size=9), SMALL_SEEDS)
def test_mixing_moves_the_mean_within_its_rounding(values: list[float], seed: int) -> None:
    """In float32 by at most n u / (1 - n u) of the mean magnitude, computed in fractions."""
    models = [torch.tensor([value], dtype=torch.float32) for value in values]
    mixed = mixed_by(permuted_ring(seed, 1, len(values)), models)
    change = sum(Fraction(float(model)) for model in mixed) - sum(map(Fraction, values))
    num_averaged = min(len(values), 3)
    rounding = num_averaged * UNIT_ROUNDOFF / (1 - num_averaged * UNIT_ROUNDOFF)
    assert abs(change) <= rounding * sum(abs(Fraction(value)) for value in values)


def test_mixing_sums_in_ascending_order_of_ranks() -> None:
    """(2^24 + 1) + 1 loses both ones in float32, (1 + 1) + 2^24 none; division is rounded once."""
    large, one = torch.tensor([2.0**24]), torch.ones(1)
    assert mixed_weights({5: one, 2: large, 9: one}) == np.float32(2.0**24) / np.float32(3)
    assert mixed_weights({2: one, 5: one, 9: large}) == np.float32(2.0**24 + 2) / np.float32(3)


def test_mixing_leaves_its_arguments_alone() -> None:
    """Messages may still be on their way while models are mixed; alone a model is copied."""
    models = random_models(3, 1)
    before = [model.clone() for model in models]
    mixed = mixed_weights(dict(enumerate(models)))
    alone = mixed_weights({0: models[0]})
    mixed += 1
    alone += 1
    assert all(map(torch.equal, models, before))


@given(SMALL_SEEDS)
def test_an_exchange_without_gradients_averages_the_pair(seed: int) -> None:
    """Then W T has AD-PSGD's pair in T, within rounding."""
    models = random_models(4, seed)
    partner = drawn_partner(seed, 2, 0, 4)
    mixed = list(models)
    mixed[2] = exchanged_weights(models[2], models[2], models[partner])
    mixed[partner] = exchanged_weights(models[partner], models[partner], models[2])
    expected = stacked(models) @ pair_matrix(4, 2, partner)
    np.testing.assert_allclose(stacked(mixed), expected, rtol=1e-14, atol=1e-14)


def test_an_exchange_keeps_the_gradients_applied_meanwhile() -> None:
    """Eq. (2): the average of what was sent and received, less the update since then."""
    sent, received, update = torch.tensor([2.0]), torch.tensor([6.0]), torch.tensor([0.5])
    assert exchanged_weights(sent - update, sent, received) == 3.5
    assert exchanged_weights(received, received, sent) == 4.0
