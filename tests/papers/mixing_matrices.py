"""The mixing matrices of paper 001, and how fast ranks agree by them."""

import math

import numpy as np
from jaxtyping import Float64

from training.algorithms.mixing import Ring


def ring_matrix(ring: Ring) -> Float64[np.ndarray, "ranks ranks"]:
    """Return T_0 of eq. (3), or P^T T_0 P of eq. (8) for a permuted ring.

    A rank takes the mean of its own model and its neighbours': thirds, halves for two ranks. So
    rings of up to three ranks have T_u.
    """
    num_ranks = len(ring.order)
    matrix = np.zeros((num_ranks, num_ranks))
    for rank in range(num_ranks):
        averaged = [rank, *ring.neighbours(rank)]
        matrix[averaged, rank] = 1 / len(averaged)
    return matrix


def uniform_matrix(num_ranks: int) -> Float64[np.ndarray, "ranks ranks"]:
    """Return T_u, with which each rank has the mean of all models after one round (001 2)."""
    return np.full((num_ranks, num_ranks), 1 / num_ranks)


def pair_matrix(num_ranks: int, active: int, passive: int) -> Float64[np.ndarray, "ranks ranks"]:
    """Return the matrix of one exchange in AD-PSGD: two ranks average, the others keep theirs."""
    assert active != passive
    matrix = np.eye(num_ranks)
    matrix[np.ix_([active, passive], [active, passive])] = 1 / 2
    return matrix


def ring_rho(num_ranks: int) -> float:
    """Return rho = ||T - T_u||_2 of a ring by eq. (6), 1/3 + 2/3 cos(2 pi / L).

    It is the factor by which a round keeps the consensus distance at most, ||W - W T_u||_F.

    The equation holds from L = 3 on; smaller rings have T_u and thus 0.
    """
    if num_ranks <= 3:  # at 3 the cosine's rounding would leave 2e-16
        return 0.0
    return 1 / 3 + 2 / 3 * math.cos(2 * math.pi / num_ranks)


def permuted_ring_contraction(num_ranks: int) -> float:
    """Return the expected factor of the squared consensus distance in a round of RAND-PSGD.

    It is 1/3 - 2 / (3 (L - 1)), the second eigenvalue of eq. (10), below 1/3 for any number of
    ranks and the same for all W. Up to three ranks have T_u and thus 0.
    """
    if num_ranks < 3:
        return 0.0
    return 1 / 3 - 2 / (3 * (num_ranks - 1))


def permuted_ring_distance(num_ranks: int, num_rounds: int) -> float:
    """Return E ||T_1 T_2 ... T_k - T_u||_F^2 of RAND-PSGD, where eq. (11) is an equality.

    The same after no round, L - 1, is the squared distance of ranks whose models are orthonormal.
    """
    return (num_ranks - 1) * permuted_ring_contraction(num_ranks) ** num_rounds
