"""Mix models by doubly stochastic matrices, and measure how fast they agree (paper 001).

W has a column for each rank's model. A round of every method of the family is eq. (2),

    W_{k+1} = W_k T - alpha_k g(Phi_k),

and the methods differ in the mixing matrix T and in Phi, the models whose gradients they take:

- synchronous SGD in the form (W - alpha g) T_u: T = T_u and Phi_k = W_k T_u. The models that are
  evaluated are those after mixing.
- D-PSGD and RAND-PSGD: T is a ring's, and Phi_k = W_k, so that mixing and gradients run side by
  side. D-PSGD has one ring for all rounds, RAND-PSGD draws a ring for each.
- D1D-PSGD: T = T_u (eq. 13), and Phi_k is "the model from the previous round of allreduce",
  W_{k-1} T_u. Then the mean of the models is exactly SGD with gradients delayed by one step.
  Eq. (14) as printed says W_{k-1}, the models before that all-reduce; then the mean is delayed SGD
  only where the mean of the gradients is the gradient of the mean.
- AD-PSGD: T averages one pair of ranks, an active and a passive one of the fixed ring (Lian et al.,
  reference 2 of 001), and Phi_k is older by the rank's staleness.

A gradient is the mean over the rank's own minibatch (eq. 1), and the rank alone applies it. So the
mean of the L models moves by alpha times the mean of L gradients, and a frame counts 1 / L of what
it counts where ranks sum their gradients.

Every rank computes the neighbours of all ranks from a seed and a counter: no rank sends them, and a
checkpoint holds these two numbers alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from pipeline.shuffling import shuffled_order


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring is the order of the ranks on a ring, where each has a left and a right neighbour.

    On a ring of two ranks the left neighbour is the right one, and counts once. A rank alone has
    no neighbour.
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.order, "a ring has at least one rank"
        assert sorted(self.order) == list(range(len(self.order))), f"not a permutation: {self}"

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the neighbours of a rank in ascending order, without the rank itself.

        A rank sends its model to them and receives theirs: two messages each way at most.
        """
        position = self.order.index(rank)
        left = self.order[position - 1]
        right = self.order[(position + 1) % len(self.order)]
        return tuple(sorted({left, right} - {rank}))


def fixed_ring(num_ranks: int) -> Ring:
    """Return the ring of D-PSGD: the ranks in their own order, in every round (eq. 3)."""
    return Ring(tuple(range(num_ranks)))


def permuted_ring(seed: int, round_index: int, num_ranks: int) -> Ring:
    """Return RAND-PSGD's ring in one mixing round: its order is a random permutation (eq. 7)."""
    return Ring(permutation(seed, round_index, num_ranks))


def permutation(seed: int, round_index: int, num_ranks: int) -> tuple[int, ...]:
    """Permute the ranks at random; the arguments alone decide, on any machine and NumPy version.

    A hash of seed and round starts PCG64, whose 64 bits for each rank are the rank's sorting key.
    Equal keys, of probability below `num_ranks`**2 / 2**65, leave ranks in their own order.
    """
    assert round_index >= 0
    return tuple(shuffled_order(num_ranks, seed, "ring", round_index).tolist())


def is_active(rank: int) -> bool:
    """Return whether a rank of AD-PSGD is active: it starts exchanges, and waits for one answer.

    A passive rank answers, and waits for no rank. So no ranks wait for each other in a cycle.
    """
    return rank % 2 == 0


def partners(rank: int, num_ranks: int) -> tuple[int, ...]:
    """Return the neighbours of the other role, with which a rank of AD-PSGD exchanges models.

    On a ring of an odd number of ranks the first and the last are active, and do not exchange:
    there the ranks form a line.
    """
    neighbours = fixed_ring(num_ranks).neighbours(rank)
    return tuple(other for other in neighbours if is_active(other) != is_active(rank))


def drawn_partner(seed: int, rank: int, exchange_index: int, num_ranks: int) -> int:
    """Return the partner of an active rank's next exchange, each with the same probability.

    `exchange_index` counts the exchanges that the rank has started. At least two ranks.
    """
    assert is_active(rank), f"rank {rank} is passive and starts no exchange"
    choices = partners(rank, num_ranks)
    order = shuffled_order(len(choices), seed, "partner", rank, exchange_index)
    return choices[int(order[0])]


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


def rho(matrix: Float64[np.ndarray, "ranks ranks"]) -> float:
    """Return ||T - T_u||_2, the largest factor by which a round keeps the consensus distance.

    This distance is the Frobenius norm of W - W T_u. For symmetric T, as all here, rho is the
    second largest magnitude of an eigenvalue (001 3); for products of them it is the second
    singular value. A rank alone has 0.
    """
    return float(np.linalg.norm(matrix - uniform_matrix(len(matrix)), 2))


def spectral_gap(matrix: Float64[np.ndarray, "ranks ranks"]) -> float:
    """Return 1 - rho: 1 for T_u, 0 where some ranks never meet."""
    return 1 - rho(matrix)


def ring_rho(num_ranks: int) -> float:
    """Return rho of a ring by eq. (6), 1/3 + 2/3 cos(2 pi / L).

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


def mixed_weights(models: Mapping[int, Float[Tensor, " elements"]]) -> Float[Tensor, " elements"]:
    """Return a rank's column of W T: the mean of its own model and its neighbours', by rank.

    The models are added in ascending order of their ranks, then divided by their number, each
    result rounded. So ranks that average the same models get the same bits. With n models the
    error is at most n u / (1 - n u) times the mean magnitude of an element's values, where u is
    the type's unit roundoff; mixing moves the mean of all models by no more.
    """
    first, *others = sorted(models)
    total = models[first].clone()
    for rank in others:
        total += models[rank]
    # By a tensor: on a GPU, torch multiplies by the rounded reciprocal of a Python number.
    return total.div_(total.new_full((), len(models)))


def exchanged_weights(
    current: Float[Tensor, " elements"],
    sent: Float[Tensor, " elements"],
    received: Float[Tensor, " elements"],
) -> Float[Tensor, " elements"]:
    """Return a rank's model after an exchange of AD-PSGD: w + (received - sent) / 2.

    `current` is `sent` and the gradients that the rank applied while the exchange ran, which the
    average must not undo. The changes of the two ranks are exactly opposite numbers, unless they
    are subnormal. So an exchange moves the mean of all models by the rounding of two sums alone.
    """
    return current + (received - sent) / 2


def local_update(
    mixed: Float[Tensor, " elements"],
    gradient: Float[Tensor, " elements"],
    learning_rate: float,
) -> Float[Tensor, " elements"]:
    """Return a column of eq. (2): the mixed weights less alpha_k times the rank's own gradient.

    The arithmetic is that of a step of `torch.optim.SGD` whose parameters are the mixed weights.
    """
    return torch.add(mixed, gradient, alpha=-learning_rate)
