"""Neighbours, roles and permutations of decentralized SGD are the same facts on all ranks."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.algorithms.mixing import (
    Ring,
    drawn_partner,
    fixed_ring,
    is_active,
    partners,
    permutation,
    permuted_ring,
)

SEEDS = st.integers(0, 2**63)
COUNTERS = st.integers(0, 10**12)
SIZES = st.integers(1, 128)


def test_the_permutation_is_a_stated_function_of_seed_and_round() -> None:
    """These are the orders of seed 7 and of a large seed, whatever machine and NumPy version."""
    assert [permutation(7, round_index, 8) for round_index in range(4)] == [
        (7, 2, 3, 5, 0, 4, 6, 1),
        (2, 6, 5, 7, 1, 0, 4, 3),
        (3, 2, 5, 4, 0, 6, 7, 1),
        (6, 7, 4, 2, 5, 1, 3, 0),
    ]
    assert permutation(2**63, 10**12, 3) == (0, 2, 1)
    assert permutation(0, 0, 1) == (0,)
    assert permuted_ring(7, 1, 8) == Ring((2, 6, 5, 7, 1, 0, 4, 3))


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
    counts = Counter[object](permutation(1, round_index, 4) for round_index in range(6000))
    assert counts.keys() == set(permutations(range(4)))
    assert chi_squared(counts, 24) < 49.7


def test_successive_rounds_and_seeds_are_independent() -> None:
    """Pairs of three ranks' orders: chi squared of 36 cells is below its 99.9 % point, 66.6."""
    rounds = Counter[object](
        (permutation(1, index, 3), permutation(1, index + 1, 3)) for index in range(0, 7200, 2)
    )
    seeds = Counter[object](
        (permutation(seed, 5, 3), permutation(seed + 1, 5, 3)) for seed in range(0, 7200, 2)
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


@pytest.mark.parametrize("order", [(), (0, 0), (1, 2), (0, 2)])
def test_a_ring_is_of_all_ranks(order: tuple[int, ...]) -> None:
    """An order that leaves ranks out, or has one twice, is none."""
    with pytest.raises(AssertionError, match=r"at least one rank|not a permutation"):
        Ring(order)


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


def test_a_passive_rank_starts_no_exchange() -> None:
    """Roles cannot be confused: the message names the rank."""
    with pytest.raises(AssertionError, match=r"^rank 3 is passive"):
        drawn_partner(0, 3, 0, 8)
