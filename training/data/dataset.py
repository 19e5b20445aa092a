"""Read training partitions as minibatches: each utterance once a sub-epoch (003 V-D).

All ranks together read each utterance once. For sequence training, lattice shards lie beside the
labelled partitions (003 VII-C3). Sub-epochs are read ahead of training, and minibatches are copied
to a device while it computes, so that no step waits for its data. What is left of a sub-epoch that
another number of ranks began is resharded over the present ones.
"""

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise, repeat
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, join_uri, scan_checked
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import Lattice, read_lattice_rows, read_lattices, read_partition
from training.data.augmentation import Augmenter
from training.data.minibatch import BufferFrames, Minibatch, Targets
from training.data.row_order import BufferPart, Lengths, RowOrder, ShuffleBuffer
from training.data.sub_epochs import DataCursor, SubEpoch
from training.data.targets import HardTargetRows, SequenceTargetRows
from training.distributed.collectives import gather_ragged
from training.distributed.process_group import ProcessGroup
from training.sequence_training.smbr import Smbr
from training.settings.model_training import SoftTargetsForm


@dataclass(frozen=True, slots=True)
class LatticeShards:
    """LatticeShards: the lattice shard of each labelled partition, by the partition's key."""

    store: ObjectStore
    run_uri: str
    outputs: Mapping[str, Output]
    criterion: Smbr

    def only_decoded(self, partition: Output, lengths: Lengths) -> Lengths:
        """Return the lengths with 0 for rows without lattice, which training leaves out."""
        rows = self.decoded_rows(partition)
        num_rows = len(lengths.num_frames)
        if len(rows) and rows[-1] >= num_rows:
            raise self._mismatch(partition, f"row {rows[-1]}", f"rows of {num_rows}")
        num_frames = np.zeros_like(lengths.num_frames)
        num_frames[rows] = lengths.num_frames[rows]
        return replace(lengths, num_frames=num_frames)

    def with_lattices(
        self, frames: BufferFrames, partition: Output, rows: Int64[np.ndarray, " utterances"]
    ) -> BufferFrames:
        """Put the lattices of a partition's `rows` beside the labels of their frames."""
        decoded = self.decoded_rows(partition)
        places = np.flatnonzero(np.isin(decoded, rows))
        data = read_output(self.store, self.run_uri, self.outputs[partition.key])
        found: dict[int, Lattice] = {
            each.row: each.lattice for each in read_lattices(data, places.tolist())
        }
        assert isinstance(frames.targets, HardTargetRows), "labelled partitions have alignments"
        lattices = [found.get(row) for row in rows.tolist()]
        for row, lattice, count in zip(rows, lattices, frames.counts, strict=True):
            if lattice is not None:
                self._check(partition, f"row {row}", lattice, int(count))
        targets = SequenceTargetRows.of(
            frames.targets, frames.firsts, frames.counts, lattices, self.criterion
        )
        return replace(frames, targets=targets)

    def _check(self, partition: Output, row: str, lattice: Lattice, num_frames: int) -> None:
        """Raise ValueError for a lattice of other senones, or of another number of frames."""
        num_senones = len(self.criterion.log_priors)
        label = int(lattice.labels.max())
        if label > num_senones:
            raise self._mismatch(partition, f"{row}: label {label}", f"labels to {num_senones}")
        if lattice.num_frames != num_frames:
            found = f"{row}: {lattice.num_frames} frames"
            raise self._mismatch(partition, found, f"{num_frames} low-rate frames")

    def _mismatch(self, partition: Output, found: str, need: str) -> ValueError:
        uri = join_uri(self.run_uri, self.outputs[partition.key].key)
        return ValueError(
            f"{uri}: {found}: need {need}, as {partition.key} and its senones have: remove the "
            "lattices' folder and run the training step again, which decodes them"
        )

    def decoded_rows(self, partition: Output) -> Int64[np.ndarray, " lattices"]:
        """Read the numbers of the partition's rows that have a lattice, in stored order."""
        uri = join_uri(self.run_uri, self.outputs[partition.key].key)
        return scan_checked(self.store, uri, read_lattice_rows)


@dataclass(frozen=True, slots=True)
class Dataset(RowOrder):
    """Dataset reads a run's training partitions in one rank's order.

    With `lattices`, rows without one are left out.
    """

    lattices: LatticeShards | None = None
    soft_targets: SoftTargetsForm | Literal["stored"] = "renormalized"

    def plan(
        self, sub_epoch: SubEpoch, index: int, lengths_of: Callable[[Output], Lengths] | None = None
    ) -> "SubEpochPlan":
        """Fix what this rank reads in sub-epoch number `index`, and in which order."""
        buffers = self.shuffle_buffers(sub_epoch, index, lengths_of)
        pieces = [(each, range(len(each.batches()))) for each in buffers]
        # A buffer has none where all its rows are without a lattice: it is not read.
        return SubEpochPlan(self, [(each, numbers) for each, numbers in pieces if numbers])

    def lengths(self, output: Output, augmenter: Augmenter) -> Lengths:
        """Read the lengths of a partition's rows in a sub-epoch: no feature."""
        # A class with slots is made twice, and super() without arguments names the first.
        lengths = RowOrder.lengths(self, output, augmenter)
        return self.lattices.only_decoded(output, lengths) if self.lattices else lengths

    def read(self, buffer: ShuffleBuffer) -> BufferFrames:
        """Fetch, decode and join the parts; of the partitions, one is in memory at a time."""
        augmenter = self.augmenter(buffer.sub_epoch, buffer.index)
        offset = buffer.sub_epoch.offset
        return BufferFrames.join([self._read(part, offset, augmenter) for part in buffer.parts])

    def _read(self, part: BufferPart, offset: int, augmenter: Augmenter) -> BufferFrames:
        data = read_output(self.store, self.run_uri, part.output)
        rows = read_partition(data, part.rows.tolist())
        frames = BufferFrames.of(rows, offset, augmenter, self.soft_targets)
        lattices = self.lattices
        return lattices.with_lattices(frames, part.output, part.rows) if lattices else frames


@dataclass(frozen=True, slots=True)
class SubEpochPlan:
    """SubEpochPlan: one rank's part of a sub-epoch, counted before any feature is read.

    It has the minibatches of these numbers of each shuffle buffer.
    """

    dataset: Dataset
    pieces: list[tuple[ShuffleBuffer, range]]

    def num_minibatches(self) -> int:
        """Count this rank's minibatches."""
        return sum(len(numbers) for _, numbers in self.pieces)

    def minibatches(
        self,
        start: int = 0,
        buffers_ahead: int = 1,
        first: list[BufferFrames] | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> Generator[Minibatch, None, None]:
        """Yield the minibatches from number `start` on; none if there are no more.

        While one buffer is trained on, threads read the next `buffers_ahead`, and no more.
        A thread's error is raised here; closing the iterator ends the threads. `first` has the
        frames of the first buffer where they are read already, and gives them up. When all buffers
        are read, a thread calls `then`, which keeps its errors.
        """
        assert start >= 0
        assert buffers_ahead >= 1
        rest = self.cut(start, self.num_minibatches()).pieces
        reads: list[Callable[[], Any]] = [partial(self.dataset.read, each) for each, _ in rest]
        if first:
            reads[0] = first.pop
        # With a thread more, the first buffer would share its core with the second.
        ahead = prefetch(
            operator.call, [*reads, then], buffers_ahead + 1, num_threads=buffers_ahead
        )
        with closing(ahead):
            for buffer, numbers in rest:
                frames = next(ahead)[1]
                batches = buffer.batches()[numbers.start : numbers.stop]
                yield from frames.minibatches(batches, self.dataset.delay)
                del frames  # before the next one is waited for

    def cut(self, first: int, last: int) -> "SubEpochPlan":
        """Return only the minibatches [first, last), as far as they exist."""
        pieces, begin = [], 0
        for buffer, numbers in self.pieces:
            if inner := numbers[max(first - begin, 0) : max(last - begin, 0)]:
                pieces.append((buffer, inner))
            begin += len(numbers)
        return SubEpochPlan(self.dataset, pieces)


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
        left = [
            piece
            for plan, count in zip(plans, counts, strict=True)
            for piece in plan.cut(count, plan.num_minibatches()).pieces
        ]
        rest = SubEpochPlan(dataset, left)
        total = rest.num_minibatches()
        # Dealt round-robin, a rank's minibatches would need a shuffle buffer of every old rank.
        edges = [total * rank // world_size for rank in range(world_size + 1)]
        plans = [rest.cut(first, last) for first, last in pairwise(edges)]
    return plans[dataset.rank]


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
        self._opened: tuple[DataCursor, SubEpochPlan, list[BufferFrames]] | None = None
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
        if opened is None or opened[0] != cursor:
            opened = cursor, self._plan(cursor), []
        _, plan, first = opened
        # Every rank must know all counts: the longest decides when the sub-epoch ends.
        if not cursor.counts:
            count = torch.tensor([plan.num_minibatches()], dtype=torch.int32)
            counts = gather_ragged(count, self.group, "sub_epoch")
            cursor = replace(cursor, counts=tuple(int(each) for each in counts))
        then = partial(self._open, cursor.next_sub_epoch())
        return cursor, plan.minibatches(cursor.num_steps, self.buffers_ahead, first, then)

    def _plan(self, cursor: DataCursor) -> SubEpochPlan:
        dataset, done = self.dataset, cursor.done
        sub_epoch = self.sub_epochs[cursor.sub_epoch]
        if sub_epoch.on_one_rank:
            if dataset.rank > 0:
                return SubEpochPlan(dataset, [])
            dataset, done = replace(dataset, world_size=1), tuple(each[:1] for each in done)
        if done:
            return reshard(dataset, sub_epoch, cursor.sub_epoch, done)
        return dataset.plan(sub_epoch, cursor.sub_epoch)

    def _open(self, cursor: DataCursor) -> None:
        """Plan a whole sub-epoch, and read its first shuffle buffer, in a thread."""
        if cursor.sub_epoch == len(self.sub_epochs):
            return
        try:
            plan = self._plan(cursor)
            first = [plan.dataset.read(each) for each, _ in plan.pieces[:1]]
        except Exception as error:  # raised where its sub-epoch begins
            self._error = error
        else:
            self._opened = cursor, plan, first


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
    copying: torch.cuda.Stream | None = None
    if device.type == "cuda":
        copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Copies from pageable memory would wait for the device.
        minibatches = made_ahead(minibatches, Tensor.pin_memory)
    copy = partial(Tensor.to, device=device, non_blocking=True)
    with closing(minibatches):
        for minibatch in minibatches:
            with torch.cuda.stream(copying):  # does nothing where there is none
                copied = moved(minibatch, copy)
            if copying is not None:
                steps = torch.cuda.current_stream(device)
                steps.wait_stream(copying)
                # Else the copying stream could reuse the memory before the step has read it.
                copied = moved(copied, partial(_recorded, steps))
            yield copied


def _recorded(steps: torch.cuda.Stream, values: Tensor) -> Tensor:
    values.record_stream(steps)
    return values


def made_ahead(
    minibatches: Generator[Minibatch, None, None], prepare: Callable[[Tensor], Tensor]
) -> Generator[Minibatch, None, None]:
    """Make the next minibatches in a thread, and prepare all but their lengths there.

    An error is raised when its minibatch's turn comes. Closing ends the thread, and the reading.
    """

    def make(_: None) -> Minibatch | None:
        minibatch = next(minibatches, None)
        return None if minibatch is None else moved(minibatch, prepare)

    ahead = prefetch(make, repeat(None), MINIBATCHES_AHEAD + 1, num_threads=1)
    with closing(minibatches), closing(ahead):
        for _, minibatch in ahead:
            if minibatch is None:
                return
            yield minibatch


def moved(minibatch: Minibatch, move: Callable[[Tensor], Tensor]) -> Minibatch:
    """Replace features and targets by what `move` makes of them."""
    targets = minibatch.targets
    make: Callable[..., Targets] = type(targets)
    values = (getattr(targets, field.name) for field in fields(targets))
    # Lattices remain on the host, where their arithmetic is.
    others = (move(each) if isinstance(each, Tensor) else each for each in values)
    return replace(minibatch, features=move(minibatch.features), targets=make(*others))
