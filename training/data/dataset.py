"""Training partitions to minibatches: each utterance once a sub-epoch over all ranks (003 V-D)."""

import operator
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from infra.prefetch import prefetch
from infra.store.checked_reads import scan_checked
from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import read_partition
from training.augmentation.augmenter import NO_AUGMENTATION, Augmenter
from training.configuration.augmentation import AugmentationConfig
from training.configuration.values import SoftTargetsForm
from training.data.batching import (
    Segments,
    chunked_minibatches,
    group_into_buffers,
    whole_utterance_minibatches,
)
from training.data.lattice_shards import LatticeShards
from training.data.minibatch import BufferFrames, Minibatch
from training.data.sharding import Lengths, PartitionSlice, read_lengths, shard_partitions
from training.data.sub_epochs import SubEpoch
from training.data.validation_speakers import left_out_rows


@dataclass(frozen=True, slots=True)
class Dataset:
    """Dataset holds a run's labelled and unlabelled training partitions, as one rank sees them.

    One labelled speaker in `validation_one_in` is left out of training, for the validation loss;
    with 0 none is, nor with partitions of development speakers, `development`. With `lattices`,
    rows without one are left out too.
    """

    store: ObjectStore
    run_uri: str
    labelled: tuple[Output, ...]
    unlabelled: tuple[Output, ...]
    delay: int
    minibatch_frames: int
    seed: int
    rank: int
    world_size: int
    validation_one_in: int = 0
    augmentation: AugmentationConfig = NO_AUGMENTATION.config
    lattices: LatticeShards | None = None
    development: tuple[Output, ...] = ()
    soft_targets: SoftTargetsForm | Literal["stored"] = "renormalized"

    def plan(
        self, sub_epoch: SubEpoch, index: int, lengths_of: Callable[[Output], Lengths] | None = None
    ) -> "SubEpochPlan":
        """Fix what this rank reads in sub-epoch number `index`, and in which order."""
        buffers = self.shuffle_buffers(sub_epoch, index, lengths_of)
        return SubEpochPlan(sub_epoch, [MinibatchRange.whole(buffer) for buffer in buffers])

    def shuffle_buffers(
        self, sub_epoch: SubEpoch, index: int, lengths_of: Callable[[Output], Lengths] | None = None
    ) -> Iterator["ShuffleBuffer"]:
        """Yield this rank's shuffle buffers of sub-epoch number `index`; read lengths as needed.

        `lengths_of` replaces `self.lengths` where they were read before.
        """
        first = 0
        augmenter = self.augmenter(sub_epoch, index)
        lengths_of = lengths_of or partial(self.lengths, augmenter=augmenter)
        parts = self._parts(sub_epoch, index, lengths_of)
        for buffer in group_into_buffers(parts, lambda part: int(part.lengths.sum())):
            yield ShuffleBuffer(self, sub_epoch, index, first, buffer)
            first += len(buffer)

    def _parts(
        self, sub_epoch: SubEpoch, index: int, lengths_of: Callable[[Output], Lengths]
    ) -> Iterator["BufferPart"]:
        """Yield this rank's rows, partition by partition, in random order."""
        slices = self.slices(sub_epoch)
        # The key makes a resumed rank plan the same order without any stored state.
        generator = np.random.default_rng([self.seed, index, self.rank])
        # Hierarchical shuffle (003 IV-A2): partitions in random order, then frames within a buffer.
        for number in generator.permutation(len(slices)):
            chosen = slices[number]
            lengths = lengths_of(chosen.output).low_rate(sub_epoch, self.delay)
            rows = self.rows(chosen, sub_epoch, len(lengths))
            if len(rows):
                yield BufferPart(chosen.output, rows, lengths[rows])

    def slices(self, sub_epoch: SubEpoch) -> list[PartitionSlice]:
        """Return this rank's part of a sub-epoch; a share holds the same rows in each pass."""
        outputs = self.labelled if sub_epoch.labelled else self.unlabelled
        if sub_epoch.is_validation and self.development:
            outputs = self.development
        return shard_partitions(outputs, sub_epoch, self.rank, self.world_size)

    def augmenter(self, sub_epoch: SubEpoch, index: int) -> Augmenter:
        """Return the augmentation of sub-epoch number `index`; validation has none."""
        if sub_epoch.is_validation:
            return NO_AUGMENTATION
        return Augmenter(self.augmentation, self.seed, index)

    def lengths(self, output: Output, augmenter: Augmenter) -> Lengths:
        """Read the lengths of a partition's rows in a sub-epoch: no feature."""
        # The lengths are one column: 10 ms, where the features of a shard take 150.
        uri = output.uri(self.run_uri)
        lengths = scan_checked(self.store, uri, partial(read_lengths, augmenter=augmenter))
        return self.lattices.only_decoded(output, lengths) if self.lattices else lengths

    def rows(
        self, part: PartitionSlice, sub_epoch: SubEpoch, num_rows: int
    ) -> Int64[np.ndarray, " rows"]:
        """Return the rows of a partition that one slice has in `sub_epoch`, in stored order."""
        rows = np.arange(num_rows)
        # Speakers are left out, as a loss on voices that training heard stops it too late.
        if sub_epoch.labelled and self.validation_one_in and not self.development:
            place = self.store, self.run_uri, self.labelled, self.validation_one_in
            left_out = left_out_rows(*place)[part.output.key]
            rows = rows[left_out == sub_epoch.is_validation]
        chosen: Int64[np.ndarray, " rows"] = rows[part.first :: part.step]
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class BufferPart:
    """BufferPart: rows of one partition, and their low-rate frames, the delay included."""

    output: Output
    rows: Int64[np.ndarray, " _rows"]
    lengths: Int64[np.ndarray, " _rows"]


@dataclass(frozen=True, slots=True)
class ShuffleBuffer:
    """ShuffleBuffer is what one rank mixes at a time; `first` numbers its first part."""

    dataset: Dataset
    sub_epoch: SubEpoch
    index: int
    first: int
    parts: list[BufferPart]

    def batches(self) -> list[Segments]:
        """Return each minibatch's segments; utterances are counted over all parts, in order."""
        # The batches follow from this key, so ranks count and resume them without features.
        key = [self.dataset.seed, self.index, self.dataset.rank, self.first]
        form = (
            whole_utterance_minibatches if self.sub_epoch.whole_utterances else chunked_minibatches
        )
        lengths = np.concatenate([part.lengths for part in self.parts])
        return form(lengths, self.dataset.minibatch_frames, np.random.default_rng(key))

    def read(self) -> BufferFrames:
        """Fetch, decode and join the parts; of the partitions, one is in memory at a time."""
        return BufferFrames.join([self._read(part) for part in self.parts])

    def _read(self, part: BufferPart) -> BufferFrames:
        data = read_output(self.dataset.store, self.dataset.run_uri, part.output)
        rows = read_partition(data, part.rows.tolist())
        augmenter = self.dataset.augmenter(self.sub_epoch, self.index)
        form = self.dataset.soft_targets
        frames = BufferFrames.of(rows, self.sub_epoch.offset, augmenter, form)
        lattices = self.dataset.lattices
        return lattices.with_lattices(frames, part.output, part.rows) if lattices else frames


@dataclass(frozen=True, slots=True)
class MinibatchRange:
    """MinibatchRange: the minibatches [first, last) of one shuffle buffer."""

    buffer: ShuffleBuffer
    first: int
    last: int

    @classmethod
    def whole(cls, buffer: ShuffleBuffer) -> "MinibatchRange":
        """Return the range of all minibatches of a shuffle buffer."""
        return cls(buffer, 0, len(buffer.batches()))

    def __len__(self) -> int:
        return self.last - self.first

    def cut(self, first: int, last: int) -> "MinibatchRange":
        """Return its own minibatches [first, last), as far as they exist."""
        begin = min(max(self.first + first, self.first), self.last)
        return MinibatchRange(self.buffer, begin, min(max(self.first + last, begin), self.last))

    def minibatches(self, frames: BufferFrames) -> Iterator[Minibatch]:
        """Yield the minibatches from the shuffle buffer's frames."""
        batches = self.buffer.batches()[self.first : self.last]
        yield from frames.minibatches(batches, self.buffer.dataset.delay)


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
        reads: list[Callable[[], Any]] = [each.buffer.read for each in rest]
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
