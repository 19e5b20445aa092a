"""Read one rank's sub-epochs ahead of training, and copy minibatches to its device.

The next sub-epoch's first buffer is read while the last one is trained on. The rest of a sub-epoch
that other ranks began is resharded over the present ones. Minibatches are copied to a device while
it computes, so that no step waits for its data.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise, repeat

import torch
from torch import Tensor

from infra.prefetch import prefetch
from training.data.dataset import Dataset, MinibatchRange, SubEpochPlan
from training.data.minibatch import BufferFrames, Minibatch, Targets
from training.data.sub_epochs import DataCursor, SubEpoch
from training.distributed.collectives import gather_ragged
from training.distributed.process_group import ProcessGroup

_LENGTHS_IN_FLIGHT = 8


def reshard(
    dataset: Dataset, sub_epoch: SubEpoch, index: int, done: Sequence[Sequence[int]]
) -> SubEpochPlan:
    """Plan this rank's part of the rest of sub-epoch number `index`, each minibatch on one rank.

    `done[0]` has, rank by rank, how many minibatches the ranks that began the sub-epoch took;
    `done[1]` those of the ranks that took over, if they were interrupted too, and so on. The
    minibatches are those that the first ranks planned; a rank takes runs of them, which come from
    few shuffle buffers.
    """
    world_sizes = [*(len(counts) for counts in done), dataset.world_size]
    first_ranks = [
        replace(dataset, rank=rank, world_size=world_sizes[0]) for rank in range(world_sizes[0])
    ]
    # Where ranks share partitions, each one's lengths would be read as often as there are ranks.
    outputs = dict.fromkeys(part.output for rank in first_ranks for part in rank.slices(sub_epoch))
    read = partial(dataset.lengths, augmenter=dataset.augmenter(sub_epoch, index))
    known = dict(prefetch(read, outputs, _LENGTHS_IN_FLIGHT))
    plans = [rank.plan(sub_epoch, index, known.__getitem__) for rank in first_ranks]
    for counts, world_size in zip(done, world_sizes[1:], strict=True):
        plans = _reshard_rest(plans, counts, world_size)
    return plans[dataset.rank]


def _reshard_rest(
    plans: Sequence[SubEpochPlan], counts: Sequence[int], world_size: int
) -> list[SubEpochPlan]:
    left: list[MinibatchRange] = []
    for plan, count in zip(plans, counts, strict=True):
        left += plan.cut(count, plan.num_minibatches()).ranges
    rest = SubEpochPlan(plans[0].sub_epoch, left)
    total = rest.num_minibatches()
    # Dealt round-robin, a rank's minibatches would need a shuffle buffer of every old rank.
    edges = [total * rank // world_size for rank in range(world_size + 1)]
    return [rest.cut(first, last) for first, last in pairwise(edges)]


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


MINIBATCHES_AHEAD = 2


def buffers_ahead(device: torch.device) -> int:
    """Return how many shuffle buffers a rank reads at a time, each in a thread.

    A GPU that trains the papers' student on 1.4 M frames a second takes what 2 to 4 cores read.
    """
    return 5 if device.type == "cuda" else 1


def device_copies(
    minibatches: Generator[Minibatch, None, None], device: torch.device
) -> Generator[Minibatch, None, None]:
    """Return the minibatches with features and targets on `device`; on a CPU, themselves.

    A thread makes each one in pinned memory, and the GPU copies it on a stream of its own, while
    the steps before are under way. Lengths remain on the host, where packing needs them. Closing
    ends the reading, too.
    """
    return minibatches if device.type == "cpu" else _copies(minibatches, device)


def _copies(
    minibatches: Generator[Minibatch, None, None], device: torch.device
) -> Generator[Minibatch, None, None]:
    copy = _copy_at_once(device)
    if device.type == "cuda":
        # Copies from pageable memory would wait for the device.
        minibatches = made_ahead(minibatches, Tensor.pin_memory)
        copy = _copy_beside_steps(device)
    with closing(minibatches):
        for minibatch in minibatches:
            yield copy(minibatch)


def made_ahead(
    minibatches: Generator[Minibatch, None, None], prepare: Callable[[Tensor], Tensor]
) -> Generator[Minibatch, None, None]:
    """Make the next minibatches in a thread, and prepare all but their lengths there.

    An error is raised when its minibatch's turn comes. Closing ends the thread, and the reading.
    """

    def make(_: None) -> Minibatch | None:
        minibatch = next(minibatches, None)
        return None if minibatch is None else _moved(minibatch, prepare)

    ahead = prefetch(make, repeat(None), MINIBATCHES_AHEAD + 1, num_threads=1)
    with closing(minibatches), closing(ahead):
        for _, minibatch in ahead:
            if minibatch is None:
                return
            yield minibatch


def _copy_at_once(device: torch.device) -> Callable[[Minibatch], Minibatch]:
    return lambda minibatch: _moved(minibatch, lambda values: values.to(device))


def _copy_beside_steps(device: torch.device) -> Callable[[Minibatch], Minibatch]:
    """Copy on a stream beside that of the steps, for which the host does not wait."""
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    def use(values: Tensor) -> Tensor:
        # Else the copying stream could reuse the memory before the step has read it.
        values.record_stream(torch.cuda.current_stream(device))
        return values

    def copy(minibatch: Minibatch) -> Minibatch:
        with torch.cuda.stream(copying):
            copied = _moved(minibatch, move)
        torch.cuda.current_stream(device).wait_stream(copying)
        return _moved(copied, use)

    return copy


def _moved(minibatch: Minibatch, move: Callable[[Tensor], Tensor]) -> Minibatch:
    targets = minibatch.targets
    make: Callable[..., Targets] = type(targets)
    values = (getattr(targets, field.name) for field in fields(targets))
    # Lattices remain on the host, where their arithmetic is.
    moved = (move(each) if isinstance(each, Tensor) else each for each in values)
    return replace(minibatch, features=move(minibatch.features), targets=make(*moved))
