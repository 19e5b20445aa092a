"""Mixing matrices are doubly stochastic, and contract as eqs. (5), (6), (10) and (11) say."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float64

from tests.papers.mixing_theory import (
    pair_matrix,
    permuted_ring_contraction,
    permuted_ring_distance,
    rho,
    ring_matrix,
    ring_rho,
    uniform_matrix,
)
from training.algorithms.mixing import Ring, drawn_partner, fixed_ring, partners, permuted_ring

Matrix = Float64[np.ndarray, "ranks ranks"]
SIZES = st.integers(1, 64)
SEEDS = st.integers(0, 2**32)


@given(SIZES, SEEDS, st.integers(0, 10**9))
def test_every_matrix_is_doubly_stochastic(num_ranks: int, seed: int, counter: int) -> None:
    """Rows and columns of rings and pairs sum to exactly 1 in float64, T_u's within L roundings."""
    matrices = [ring_matrix(fixed_ring(num_ranks))]
    matrices.append(ring_matrix(permuted_ring(seed, counter, num_ranks)))
    if num_ranks > 1:
        partner = drawn_partner(seed, 0, counter, num_ranks)
        matrices.append(pair_matrix(num_ranks, 0, partner))
    for matrix in matrices:
        assert matrix.shape == (num_ranks, num_ranks)
        assert (matrix >= 0).all()
        assert (matrix.sum(0) == 1).all()
        assert (matrix.sum(1) == 1).all()
        assert np.array_equal(matrix, matrix.T)
    uniform = uniform_matrix(num_ranks)
    np.testing.assert_allclose(uniform.sum(0), 1, rtol=num_ranks * 2**-53)
    np.testing.assert_allclose(uniform.sum(1), 1, rtol=num_ranks * 2**-53)


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


@pytest.mark.parametrize("num_ranks", [*range(1, 20), 32, 64, 128])
def test_rho_of_the_ring_is_eq_6(num_ranks: int) -> None:
    """The closed form is rho = max(|lambda_2|, |lambda_L|), and the second singular value."""
    matrix = ring_matrix(fixed_ring(num_ranks))
    magnitudes = sorted(np.abs(np.linalg.eigvalsh(matrix)))
    assert ring_rho(num_ranks) == pytest.approx(rho(matrix), abs=1e-13)
    assert ring_rho(num_ranks) == pytest.approx([0, *magnitudes][-2], abs=1e-13)


def all_rings(num_ranks: int) -> list[Matrix]:
    """Return the matrices of all orders of a ring that begins with rank 0."""
    return [ring_matrix(Ring((0, *rest))) for rest in permutations(range(1, num_ranks))]


@pytest.mark.parametrize("num_ranks", [3, 4, 5, 6, 7])
def test_the_mean_square_over_all_permutations_is_eq_10(num_ranks: int) -> None:
    """The diagonal is 1/3, all else 2 / (3 (L - 1)), and its second eigenvalue the contraction."""
    mean_square = np.mean([matrix.T @ matrix for matrix in all_rings(num_ranks)], axis=0)
    expected = np.full((num_ranks, num_ranks), 2 / (3 * (num_ranks - 1)))
    np.fill_diagonal(expected, 1 / 3)
    np.testing.assert_allclose(mean_square, expected, atol=1e-13)
    assert permuted_ring_contraction(num_ranks) == pytest.approx(rho(mean_square), abs=1e-13)


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


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8, 20])
def test_pairs_contract_by_the_mean_over_the_edges(num_ranks: int) -> None:
    """One exchange leaves some distances whole; on average over the edges of an even ring the
    squared distance keeps at most 1 - (1 - cos(2 pi / L)) / L, or nothing for two ranks."""
    edges = {
        (min(rank, other), max(rank, other))
        for rank in range(num_ranks)
        for other in partners(rank, num_ranks)
    }
    matrices = [pair_matrix(num_ranks, *edge) for edge in sorted(edges)]
    for matrix in matrices:
        assert np.array_equal(matrix @ matrix, matrix)
        assert rho(matrix) == pytest.approx(0 if num_ranks == 2 else 1, abs=1e-13)
    mean_square = np.mean([matrix.T @ matrix for matrix in matrices], axis=0)
    expected = 0 if num_ranks == 2 else 1 - (1 - np.cos(2 * np.pi / num_ranks)) / num_ranks
    assert rho(mean_square) == pytest.approx(expected, abs=1e-13)
