"""Read one rank's sub-epochs in turn; begin to read the next while the last one is trained on."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from training.data.cursor import DataCursor
from training.data.dataset import Dataset, SubEpochPlan
from training.data.minibatch import BufferFrames, Minibatch
from training.data.resharding import reshard
from training.data.sub_epochs import SubEpoch
from training.distributed.collectives import gather_ragged
from training.distributed.process_group import ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """Opened: a planned sub-epoch, and the frames of its first shuffle buffer if they are read."""

    cursor: DataCursor
    plan: SubEpochPlan
    first: list[BufferFrames]


class SubEpochReader:
    """SubEpochReader yields one rank's minibatches of `sub_epochs`.

    A thread plans the next sub-epoch, and reads its first shuffle buffer, in place of a buffer of
    its own sub-epoch, as soon as those are read: memory keeps its bound. Small data are a buffer a
    sub-epoch, and would otherwise be read while training waits.
    """

    def __init__(
        self,
        dataset: Dataset,
        sub_epochs: Sequence[SubEpoch],
        group: ProcessGroup,
        buffers_ahead: int = 1,
    ) -> None:
        self.dataset = dataset
        self.sub_epochs = sub_epochs
        self.group = group
        self.buffers_ahead = buffers_ahead
        self._opened: Opened | None = None
        self._error: Exception | None = None

    def begin(self, cursor: DataCursor) -> tuple[DataCursor, Generator[Minibatch, None, None]]:
        """Return the cursor with every rank's number of minibatches, and what this rank has left.

        All ranks call this together; they count where the sub-epoch begins or is resharded. Close
        the minibatches before the next sub-epoch begins. An error of reading it ahead is raised.
        """
        if self._error is not None:
            # The store was asked for as long as it ever is: asked again, ranks would wait twice.
            raise self._error
        opened, self._opened = self._opened, None
        if opened is None or opened.cursor != cursor:
            opened = Opened(cursor, self._plan(cursor), [])
        # Every rank must know all counts: the longest decides when the sub-epoch ends.
        if not cursor.counts:
            count = torch.tensor([opened.plan.num_minibatches()], dtype=torch.int32)
            counts = gather_ragged(count, self.group, "sub_epoch")
            cursor = cursor.sharded([int(each) for each in counts])
        then = partial(self._open, cursor.next_sub_epoch())
        minibatches = opened.plan.minibatches(
            cursor.num_steps, self.buffers_ahead, opened.first, then
        )
        return cursor, minibatches

    def _plan(self, cursor: DataCursor) -> SubEpochPlan:
        sub_epoch = self.sub_epochs[cursor.sub_epoch]
        if cursor.done:
            return reshard(self.dataset, sub_epoch, cursor.sub_epoch, cursor.done)
        return self.dataset.plan(sub_epoch, cursor.sub_epoch)

    def _open(self, cursor: DataCursor) -> None:
        """Plan a whole sub-epoch, and read its first shuffle buffer, in a thread."""
        if cursor.sub_epoch == len(self.sub_epochs):
            return
        try:
            plan = self._plan(cursor)
            first = [each.read() for each in plan.ranges[:1]]
        except Exception as error:  # raised where its sub-epoch begins
            self._error = error
        else:
            self._opened = Opened(cursor, plan, first)
