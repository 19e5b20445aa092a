"""Mix models by doubly stochastic matrices (paper 001).

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

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
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
    """Return RAND-PSGD's ring in one mixing round: its order is a random permutation (eq. 7).

    The arguments alone decide, on any machine and NumPy version. A hash of seed and round starts
    PCG64, whose 64 bits for each rank are the rank's sorting key. Equal keys, of probability below
    `num_ranks`**2 / 2**65, leave ranks in their own order.
    """
    return Ring(tuple(shuffled_order(num_ranks, seed, "ring", round_index).tolist()))


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
