"""The order in which a rank reads the rows of training partitions: of ids and lengths alone.

No module that it needs imports torch, so an order is also certified without it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Int64

from infra.store.object_store import ObjectStore, scan_checked
from pipeline.runs.manifest import Output
from training.augmentation.augmenter import NO_AUGMENTATION, Augmenter
from training.configuration.augmentation import AugmentationConfig
from training.data.batching import (
    Segments,
    chunked_minibatches,
    group_into_buffers,
    whole_utterance_minibatches,
)
from training.data.sharding import Lengths, PartitionSlice, read_lengths, shard_partitions
from training.data.sub_epochs import SubEpoch
from training.data.validation_speakers import left_out_rows


@dataclass(frozen=True, slots=True)
class RowOrder:
    """RowOrder holds a run's labelled and unlabelled training partitions, as one rank sees them.

    One labelled speaker in `validation_one_in` is left out of training, for the validation loss;
    with 0 none is, nor with partitions of development speakers, `development`.
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
    development: tuple[Output, ...] = ()

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
            found = lengths_of(chosen.output)
            lengths = found.low_rate(sub_epoch, self.delay)
            rows = self.rows(chosen, sub_epoch, found)
            if len(rows):
                yield BufferPart(chosen.output, rows, lengths[rows])

    def slices(self, sub_epoch: SubEpoch) -> list[PartitionSlice]:
        """Return this rank's part of a sub-epoch; a share holds the same rows in each pass."""
        outputs = self.labelled if sub_epoch.labelled else self.unlabelled
        if sub_epoch.is_validation and self.development:
            outputs = self.development
        return shard_partitions(outputs, sub_epoch, self.rank, self.world_size)

    def augmenter(self, sub_epoch: SubEpoch, index: int) -> Augmenter:
        """Return the augmentation of sub-epoch number `index`; validation has none.

        So it reads all placements: losses of models that train on different ones can be compared.
        """
        if sub_epoch.is_validation:
            return NO_AUGMENTATION
        return Augmenter(self.augmentation, self.seed, index)

    def lengths(self, output: Output, augmenter: Augmenter) -> Lengths:
        """Read the lengths of a partition's rows in a sub-epoch: no feature."""
        # The lengths are one column: 10 ms, where the features of a shard take 150.
        uri = output.uri(self.run_uri)
        return scan_checked(self.store, uri, partial(read_lengths, augmenter=augmenter))

    def rows(
        self, part: PartitionSlice, sub_epoch: SubEpoch, lengths: Lengths
    ) -> Int64[np.ndarray, " rows"]:
        """Return the rows of a partition that one slice has in `sub_epoch`, in stored order."""
        # Slices divide the rows that are read, so that ranks have as many of them.
        rows = lengths.rows
        # Speakers are left out, as a loss on voices that training heard stops it too late.
        if sub_epoch.labelled and self.validation_one_in and not self.development:
            place = self.store, self.run_uri, self.labelled, self.validation_one_in
            left_out = left_out_rows(*place)[part.output.key]
            rows = rows[left_out[rows] == sub_epoch.is_validation]
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

    order: RowOrder
    sub_epoch: SubEpoch
    index: int
    first: int
    parts: list[BufferPart]

    def batches(self) -> list[Segments]:
        """Return each minibatch's segments; utterances are counted over all parts, in order."""
        # The batches follow from this key, so ranks count and resume them without features.
        key = [self.order.seed, self.index, self.order.rank, self.first]
        form = (
            whole_utterance_minibatches if self.sub_epoch.whole_utterances else chunked_minibatches
        )
        lengths = np.concatenate([part.lengths for part in self.parts])
        return form(lengths, self.order.minibatch_frames, np.random.default_rng(key))
