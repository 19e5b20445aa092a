"""The data cursor: how far training has come in its data, whatever the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DataCursor:
    """The sub-epoch, and the steps that the present ranks have taken in it.

    `counts` holds the minibatches that each of them has in all, () where the sub-epoch, or its
    rest, is yet to be sharded; `done` what each rank made that took part in it before them.
    """

    sub_epoch: int = 0
    done: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()
    num_steps: int = 0

    @property
    def num_steps_left(self) -> int:
        """How many steps the sub-epoch still has: those of the rank that has most minibatches."""
        return max(self.counts) - self.num_steps

    def dealt(self, counts: Sequence[int]) -> "DataCursor":
        """The same place, where each rank has so many minibatches."""
        return replace(self, counts=tuple(counts))

    def stepped(self) -> "DataCursor":
        """One step later."""
        return replace(self, num_steps=self.num_steps + 1)

    def resumed(self, num_ranks: int) -> "DataCursor":
        """The same place for `num_ranks` ranks; if there were others, the rest is to be dealt."""
        if not self.counts or len(self.counts) == num_ranks:
            return self
        done = tuple(min(self.num_steps, count) for count in self.counts)
        return DataCursor(self.sub_epoch, (*self.done, done))

    def next_sub_epoch(self) -> "DataCursor":
        """The beginning of the sub-epoch after this one."""
        return DataCursor(self.sub_epoch + 1)
