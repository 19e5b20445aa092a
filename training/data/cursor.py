"""The data cursor: how far training has come in its data, whatever the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DataCursor:
    """DataCursor holds the sub-epoch, and the steps that the present ranks have taken in it.

    A step is a minibatch; one of a larger minibatch size counts as several.

    `counts` holds the minibatches that each of them has in all, () where the sub-epoch, or its
    rest, is not sharded yet. `done` holds how many each rank took of those that came before them.
    """

    sub_epoch: int = 0
    done: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()
    num_steps: int = 0

    @property
    def num_steps_left(self) -> int:
        """Count the steps left in the sub-epoch: those of the rank with most minibatches."""
        return max(self.counts) - self.num_steps

    @property
    def share(self) -> float:
        """Return the share of all ranks' minibatches of the sub-epoch that they have taken."""
        before = sum(map(sum, self.done))
        taken = sum(min(self.num_steps, count) for count in self.counts)
        return (before + taken) / max(before + sum(self.counts), 1)

    def sharded(self, counts: Sequence[int]) -> "DataCursor":
        """Return the same place, where each rank has so many minibatches."""
        return replace(self, counts=tuple(counts))

    def stepped(self, num_minibatches: int = 1) -> "DataCursor":
        """Return the place one step later, in which each rank took so many minibatches, if left."""
        return replace(self, num_steps=self.num_steps + min(num_minibatches, self.num_steps_left))

    def resumed(self, num_ranks: int) -> "DataCursor":
        """Return the same place for `num_ranks` ranks; after others the rest must be resharded."""
        if not self.counts or len(self.counts) == num_ranks:
            return self
        # A rank with fewer minibatches took them all, and then empty steps.
        done = tuple(min(self.num_steps, count) for count in self.counts)
        return DataCursor(self.sub_epoch, (*self.done, done))

    def next_sub_epoch(self) -> "DataCursor":
        """Return the beginning of the next sub-epoch."""
        return DataCursor(self.sub_epoch + 1)
