"""Sharding: the rows of training partitions that a rank has in a sub-epoch, and their lengths."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from jaxtyping import Int64

from pipeline.runs.manifest import Output
from pipeline.shards import read_partition_ids, read_partition_lengths
from pipeline.splicing import STACK
from training.augmentation.augmenter import Augmenter
from training.data.sub_epochs import SubEpoch


@dataclass(frozen=True, slots=True)
class PartitionSlice:
    """PartitionSlice: the rows first, first + step, ... of one training partition."""

    output: Output
    first: int
    step: int


def shard_partitions(
    outputs: Sequence[Output], sub_epoch: SubEpoch, rank: int, world_size: int
) -> list[PartitionSlice]:
    """Return one rank's part of a sub-epoch: whole partitions, or slices where they are too few.

    Over all ranks of all shares, every row of every partition is in exactly one slice.
    """
    num_parts = sub_epoch.num_shares * world_size
    own = sub_epoch.share + sub_epoch.num_shares * rank
    step = 1
    # With 4 partitions or more a part, whole ones leave ranks within a quarter of each other.
    if len(outputs) < 4 * num_parts:
        # Each slice costs reading all of its partition: about 16 a part bound that.
        step = min(num_parts, math.ceil(16 * num_parts / max(len(outputs), 1)))
    numbers = range(own, len(outputs) * step, num_parts)
    return [PartitionSlice(outputs[number // step], number % step, step) for number in numbers]


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths: 10 ms frames of a partition's rows, and their offsets, in stored order."""

    num_frames: Int64[np.ndarray, " rows"]
    offsets: Int64[np.ndarray, " rows"]

    def low_rate(self, sub_epoch: SubEpoch, delay: int) -> Int64[np.ndarray, " rows"]:
        """Count each row's low-rate frames in `sub_epoch`, the delay included; 0 for none."""
        own = np.zeros_like(self.offsets) if sub_epoch.labelled else self.offsets
        offsets = (own + sub_epoch.offset) % STACK
        counts = (self.num_frames - offsets) // STACK
        lengths: Int64[np.ndarray, " rows"] = np.where(counts > 0, counts + delay, 0)
        return lengths


def read_lengths(file: BinaryIO | io.IOBase, augmenter: Augmenter) -> Lengths:
    """Read the lengths that a partition's rows have in a sub-epoch, at their drawn speeds."""
    if not augmenter.config.changes_speed:
        return Lengths(*read_partition_lengths(file))
    # With the ids and their hashes, lengths of two hours take 3.6 ms instead of 1.2.
    utterance_ids, lengths = read_partition_ids(file)
    num_frames, offsets = lengths
    return Lengths(augmenter.num_frames(utterance_ids, num_frames), offsets)
