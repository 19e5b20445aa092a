"""How far training has come in its data, also where the number of ranks changes within a visit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Position:
    """The visit, and the steps that the present ranks have taken in it.

    `counts` holds the minibatches that each of them has in all, () where the visit, or its rest,
    is yet to be dealt; `done` what each rank made that took part in the visit before them.
    """

    visit: int = 0
    done: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()
    num_steps: int = 0

    @property
    def num_steps_left(self) -> int:
        """How many steps the visit still has: those of the rank that has most minibatches."""
        return max(self.counts) - self.num_steps

    def dealt(self, counts: Sequence[int]) -> "Position":
        """The same place, where each rank has so many minibatches."""
        return replace(self, counts=tuple(counts))

    def stepped(self) -> "Position":
        """One step later."""
        return replace(self, num_steps=self.num_steps + 1)

    def resumed(self, num_ranks: int) -> "Position":
        """The same place for `num_ranks` ranks; if there were others, the rest is to be dealt."""
        if not self.counts or len(self.counts) == num_ranks:
            return self
        done = tuple(min(self.num_steps, count) for count in self.counts)
        return Position(self.visit, (*self.done, done))

    def next_visit(self) -> "Position":
        """The beginning of the visit after this one."""
        return Position(self.visit + 1)
