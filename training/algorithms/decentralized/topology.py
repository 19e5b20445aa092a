"""Define the neighbours of a rank in a round of decentralized SGD (paper 001 3 and 4).

D-PSGD has one ring for all mixing rounds, RAND-PSGD draws a ring for each. In AD-PSGD an active and
a passive rank of the fixed ring exchange models in pairs (Lian et al., reference 2 of 001). Every
rank computes the neighbours of all ranks from a seed and a counter: no rank sends them, and a
checkpoint holds these two numbers alone.
"""

from dataclasses import dataclass

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
