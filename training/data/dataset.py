"""Read training partitions as minibatches: each utterance once a sub-epoch (003 V-D).

All ranks together read each utterance once. For sequence training, lattice shards lie beside the
labelled partitions (003 VII-C3).
"""

import operator
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, join_uri, scan_checked
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import Lattice, read_lattice_rows, read_lattices, read_partition
from training.data.augmentation import Augmenter
from training.data.minibatch import BufferFrames, Minibatch
from training.data.row_order import BufferPart, Lengths, RowOrder, ShuffleBuffer
from training.data.sub_epochs import SubEpoch
from training.data.targets import HardTargetRows, SequenceTargetRows
from training.sequence_training.smbr import Smbr
from training.settings.values import SoftTargetsForm


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
        return SubEpochPlan(sub_epoch, [MinibatchRange.whole(self, buffer) for buffer in buffers])

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
class MinibatchRange:
    """MinibatchRange: the minibatches [first, last) of one shuffle buffer."""

    dataset: Dataset
    buffer: ShuffleBuffer
    first: int
    last: int

    @classmethod
    def whole(cls, dataset: Dataset, buffer: ShuffleBuffer) -> "MinibatchRange":
        """Return the range of all minibatches of a shuffle buffer."""
        return cls(dataset, buffer, 0, len(buffer.batches()))

    def __len__(self) -> int:
        return self.last - self.first

    def cut(self, first: int, last: int) -> "MinibatchRange":
        """Return its own minibatches [first, last), as far as they exist."""
        begin = min(max(self.first + first, self.first), self.last)
        end = min(max(self.first + last, begin), self.last)
        return MinibatchRange(self.dataset, self.buffer, begin, end)

    def read(self) -> BufferFrames:
        """Read the frames of the whole shuffle buffer."""
        return self.dataset.read(self.buffer)

    def minibatches(self, frames: BufferFrames) -> Iterator[Minibatch]:
        """Yield the minibatches from the shuffle buffer's frames."""
        batches = self.buffer.batches()[self.first : self.last]
        yield from frames.minibatches(batches, self.dataset.delay)


@dataclass(frozen=True, slots=True)
class SubEpochPlan:
    """SubEpochPlan: one rank's part of a sub-epoch, counted before any feature is read."""

    sub_epoch: SubEpoch
    ranges: list[MinibatchRange]

    def num_minibatches(self) -> int:
        """Count this rank's minibatches."""
        return sum(map(len, self.ranges))

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
        if start < 0:
            raise ValueError(f"start = {start}: need the number of a minibatch, from 0 on")
        if buffers_ahead < 1:
            raise ValueError(f"buffers_ahead = {buffers_ahead}: need at least 1")
        rest = self.cut(start, self.num_minibatches()).ranges
        reads: list[Callable[[], Any]] = [each.read for each in rest]
        if first:
            reads[0] = first.pop
        # With a thread more, the first buffer would share its core with the second.
        ahead = prefetch(
            operator.call, [*reads, then], buffers_ahead + 1, num_threads=buffers_ahead
        )
        with closing(ahead):
            for minibatch_range in rest:
                frames = next(ahead)[1]
                yield from minibatch_range.minibatches(frames)
                del frames  # before the next one is waited for

    def cut(self, first: int, last: int) -> "SubEpochPlan":
        """Return only the minibatches [first, last), as far as they exist."""
        ranges, begin = [], 0
        for minibatch_range in self.ranges:
            inner = minibatch_range.cut(first - begin, last - begin)
            if len(inner):
                ranges.append(inner)
            begin += len(minibatch_range)
        return SubEpochPlan(self.sub_epoch, ranges)
