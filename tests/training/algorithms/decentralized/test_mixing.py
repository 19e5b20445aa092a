"""Mixing matrices are doubly stochastic, and contract as eqs. (5), (6), (10) and (11) say."""

from itertools import permutations, product

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
    spectral_gap,
    uniform_matrix,
)
from training.algorithms.mixing import Ring, drawn_partner, fixed_ring, partners, permuted_ring

Matrix = Float64[np.ndarray, "ranks ranks"]
SIZES = st.integers(1, 64)
SEEDS = st.integers(0, 2**32)


def consensus_distance(models: Float64[np.ndarray, "elements ranks"]) -> float:
    """Return the Frobenius norm of W - W T_u."""
    return float(np.linalg.norm(models - models.mean(axis=1, keepdims=True)))


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


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_small_rings_are_uniform(num_ranks: int) -> None:
    """Up to three ranks T_0 is T_u, bitwise, in any order: rho is 0 and the spectral gap 1."""
    for order in permutations(range(num_ranks)):
        assert np.array_equal(ring_matrix(Ring(order)), uniform_matrix(num_ranks))
    assert spectral_gap(uniform_matrix(num_ranks)) == 1
    assert (ring_rho(num_ranks), permuted_ring_contraction(num_ranks)) == (0, 0)


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
    assert spectral_gap(matrix) == pytest.approx(1 - ring_rho(num_ranks), abs=1e-13)


def test_the_rings_spectral_gap_vanishes_with_the_ranks() -> None:
    """From 4 ranks to 128 the gap falls from 2/3 to 0.0008, as (2 pi / L)^2 / 3."""
    assert 1 - ring_rho(4) == pytest.approx(2 / 3)
    assert 1 - ring_rho(128) == pytest.approx((2 * np.pi / 128) ** 2 / 3, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [4, 5, 8, 33])
def test_powers_of_the_ring_are_within_eq_5(num_ranks: int) -> None:
    """||T_0^k - T_u||_2 equals rho^k: T_0 is symmetric, so the bound is reached."""
    matrix = ring_matrix(fixed_ring(num_ranks))
    for power in (1, 2, 5, 12):
        distance = rho(np.linalg.matrix_power(matrix, power))
        assert distance == pytest.approx(ring_rho(num_ranks) ** power, abs=1e-13)


@pytest.mark.parametrize("num_ranks", [4, 5, 8, 33])
def test_the_ring_contracts_a_wave_by_rho(num_ranks: int) -> None:
    """One wave around the ring loses the factor of eq. (6) a round, and no models lose less."""
    matrix, wave = ring_matrix(fixed_ring(num_ranks)), np.arange(num_ranks) * 2 * np.pi / num_ranks
    models = np.stack([np.cos(wave) + 5, np.sin(wave) - 3])
    for _ in range(6):
        mixed = models @ matrix
        ratio = consensus_distance(mixed) / consensus_distance(models)
        assert ratio == pytest.approx(ring_rho(num_ranks), rel=1e-12)
        models = mixed


@given(st.integers(2, 40), SEEDS)
def test_no_models_stay_further_apart_than_rho(num_ranks: int, seed: int) -> None:
    """||W T - W T_u|| <= rho ||W - W T_u|| for the ring, a permuted one, and their product."""
    models = np.random.default_rng(seed).normal(size=(3, num_ranks))
    first, second = (
        ring_matrix(fixed_ring(num_ranks)),
        ring_matrix(permuted_ring(seed, 0, num_ranks)),
    )
    for matrix in (first, second, first @ second):
        bound = rho(matrix) * consensus_distance(models)
        assert consensus_distance(models @ matrix) <= bound * (1 + 1e-12) + 1e-12


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


@pytest.mark.parametrize(
    ("num_ranks", "num_rounds"), [(3, 2), (4, 3), (5, 0), (5, 1), (5, 2), (6, 2)]
)
def test_eq_11_is_an_equality_over_all_permutations(num_ranks: int, num_rounds: int) -> None:
    """The mean of ||T_1 ... T_k - T_u||_F^2 over all k-tuples of rings is eq. (11)."""
    uniform = uniform_matrix(num_ranks)
    squares = []
    for matrices in product(all_rings(num_ranks), repeat=num_rounds):
        mixed = np.linalg.multi_dot([np.eye(num_ranks), np.eye(num_ranks), *matrices])
        squares.append(np.linalg.norm(mixed - uniform) ** 2)
    expected = permuted_ring_distance(num_ranks, num_rounds)
    assert np.mean(squares) == pytest.approx(expected, abs=1e-12)
    assert expected <= (num_ranks - 1) / 3**num_rounds


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


def test_drawn_rings_contract_any_models_alike() -> None:
    """Even the fixed ring's slowest wave loses eq. (10)'s factor, within 4 standard errors.

    There are 32 ranks: 0.31 of the squared distance is left, and 0.97 with the fixed ring.
    """
    wave = np.cos(np.arange(32) * 2 * np.pi / 32)[np.newaxis]
    before = consensus_distance(wave) ** 2
    ratios = [
        consensus_distance(wave @ ring_matrix(permuted_ring(5, index, 32))) ** 2 / before
        for index in range(1000)
    ]
    error = np.std(ratios, ddof=1) / np.sqrt(len(ratios))
    assert error < 0.01
    assert abs(np.mean(ratios) - permuted_ring_contraction(32)) <= 4 * error
    assert ring_rho(32) ** 2 == pytest.approx(0.974, abs=1e-3)


@pytest.mark.parametrize("num_ranks", range(1, 129))
def test_permuted_rings_are_never_slower(num_ranks: int) -> None:
    """RAND-PSGD's root mean square factor is rho at up to 4 ranks, then less, below 3^-1/2."""
    permuted = permuted_ring_contraction(num_ranks) ** 0.5
    if num_ranks <= 4:
        assert permuted == pytest.approx(ring_rho(num_ranks), abs=1e-12)
    else:
        assert permuted < ring_rho(num_ranks)
    assert permuted < 3**-0.5


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


def test_a_pair_is_of_two_ranks() -> None:
    """A rank does not exchange models with itself."""
    with pytest.raises(AssertionError):
        pair_matrix(4, 2, 2)
