"""Order the rows that a rank reads in a sub-epoch: shard, buffer, shuffle and batch them.

Only ids and lengths are read, so all ranks count their steps beforehand. No module imported here
imports torch, so an order is also certified without it. Minibatches hold 32-frame chunks in random
order, or whole utterances (003 II-B). Some labelled speakers are left out of training: newbob
measures its loss on them (000 3.2). Other trainings are validated on development speakers.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import chain, zip_longest
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from jaxtyping import Bool, Int64

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, scan_checked
from pipeline.filterbank import STACK
from pipeline.records import source_id
from pipeline.runs.manifest import Output
from pipeline.sampling import sampling_priority
from pipeline.shards import (
    PartitionIndex,
    read_partition_index,
    read_partition_lengths,
    read_partition_speakers,
)
from training.data.augmentation import NO_AUGMENTATION, Augmenter
from training.data.sub_epochs import SubEpoch
from training.settings.model_training import AugmentationConfig


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

    Over all ranks of all shares, every row of every partition is in exactly one slice. A share has
    the same rows on any number of ranks, so that training goes on with others of them.
    """
    num_outputs, num_shares = len(outputs), sub_epoch.num_shares
    # With 4 partitions or more a share, whole ones leave shares within a quarter of each other.
    step = 1 if num_outputs >= 4 * num_shares else _num_slices(num_outputs, num_shares)
    share = range(sub_epoch.share, num_outputs * step, num_shares)
    is_whole = num_outputs >= 4 * num_shares * world_size
    own_step = 1 if is_whole else _num_slices(len(share), world_size)
    numbers = (divmod(each, own_step) for each in range(rank, len(share) * own_step, world_size))
    return [
        PartitionSlice(
            outputs[share[number] // step], share[number] % step + step * own, step * own_step
        )
        for number, own in numbers
    ]


def _num_slices(num_units: int, num_parts: int) -> int:
    """Return into how many slices to cut each unit, so that parts of them are nearly equal."""
    # Each slice costs reading all of its partition: about 16 a part bound that.
    return min(num_parts, math.ceil(16 * num_parts / max(num_units, 1)))


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths: 10 ms frames of a partition's rows, and their offsets, in stored order.

    `are_read` says which rows are at the placements that a model trains on; None: all are.
    """

    num_frames: Int64[np.ndarray, " rows"]
    offsets: Int64[np.ndarray, " rows"]
    are_read: Bool[np.ndarray, " rows"] | None = None

    @property
    def rows(self) -> Int64[np.ndarray, " _rows"]:
        """Return the numbers of the rows that are read."""
        every: Int64[np.ndarray, " _rows"] = np.arange(len(self.num_frames))
        return every if self.are_read is None else every[self.are_read]

    def low_rate(self, sub_epoch: SubEpoch, delay: int) -> Int64[np.ndarray, " rows"]:
        """Count each row's low-rate frames in `sub_epoch`, the delay included; 0 for none."""
        own = np.zeros_like(self.offsets) if sub_epoch.labelled else self.offsets
        offsets = (own + sub_epoch.offset) % STACK
        counts = (self.num_frames - offsets) // STACK
        lengths: Int64[np.ndarray, " rows"] = np.where(counts > 0, counts + delay, 0)
        return lengths


def read_lengths(file: BinaryIO | io.IOBase, augmenter: Augmenter) -> Lengths:
    """Read the lengths that a partition's rows have in a sub-epoch, and which of them it reads."""
    config = augmenter.config
    if not (config.changes_speed or config.placements):
        return Lengths(*read_partition_lengths(file))
    # With the ids and their hashes, lengths of two hours take 3.6 ms instead of 1.2.
    index = read_partition_index(file)
    num_frames = index.num_frames
    if config.changes_speed:
        num_frames = augmenter.num_frames(index.utterance_ids, num_frames)
    are_read = np.array(config.are_read(index.placements), bool) if config.placements else None
    return Lengths(num_frames, index.offsets, are_read)


def one_of(names: Iterable[str], one_in: int) -> list[str]:
    """Return one name in `one_in`, at least one: those of the lowest hashes; not the only one.

    A hash depends on no other name, so that more data leave mostly the same speakers out.
    """
    found = sorted(set(names), key=lambda name: (sampling_priority(0, name), name))
    return found[: max(1, len(found) // one_in)] if len(found) > 1 else []


@cache  # the same for all sub-epochs of a training, whose partitions do not change
def left_out_rows(
    store: ObjectStore, run_uri: str, labelled: tuple[Output, ...], one_in: int
) -> Mapping[str, Bool[np.ndarray, " rows"]]:
    """Find the rows of the validation speakers, by their partition's key; read one column of each.

    Of a single speaker, utterances are left out, each in all of its placements.
    """

    def read(scan: Callable[[BinaryIO | io.IOBase], list[str]]) -> Mapping[str, list[str]]:
        uris = [output.uri(run_uri) for output in labelled]
        found = prefetch(partial(scan_checked, store, scan=scan), uris, 16)
        return {output.key: names for output, (_, names) in zip(labelled, found, strict=True)}

    names_of = read(read_partition_speakers)
    if len(set(chain.from_iterable(names_of.values()))) == 1:
        names_of = read(_read_sources)
    chosen = set(one_of(chain.from_iterable(names_of.values()), one_in))
    return {
        key: np.array([each in chosen for each in names], np.bool_)
        for key, names in names_of.items()
    }


def _read_sources(file: BinaryIO | io.IOBase) -> list[str]:
    """Read the id that each row's utterance has in all placements."""
    index = read_partition_index(file)
    named = zip(index.utterance_ids, index.placements, strict=True)
    return [source_id(name, [placement] if placement else []) for name, placement in named]


@cache
def spread_rows(
    store: ObjectStore, run_uri: str, partitions: tuple[Output, ...], limit_ms: int
) -> Mapping[str, Bool[np.ndarray, " rows"]]:
    """Choose utterances of about `limit_ms` in all, evenly from the speakers, at least one.

    The speakers take turns, each with the utterance of its next lowest hash. Returns by a
    partition's key which of its rows are chosen; reads columns, and no feature.
    """

    def read(file: BinaryIO | io.IOBase) -> tuple[PartitionIndex, list[str]]:
        return read_partition_index(file), read_partition_speakers(file)

    uris = [output.uri(run_uri) for output in partitions]
    chosen: dict[str, Bool[np.ndarray, " rows"]] = {}
    by_speaker: dict[str, list[tuple[int, str, int, str, int]]] = {}
    indexes = prefetch(partial(scan_checked, store, scan=read), uris, 16)
    for output, (_, (index, speakers)) in zip(partitions, indexes, strict=True):
        chosen[output.key] = np.zeros(len(speakers), np.bool_)
        named = zip(index.utterance_ids, speakers, index.durations_ms, strict=True)
        for row, (utterance, speaker, duration_ms) in enumerate(named):
            entry = sampling_priority(0, utterance), utterance, duration_ms, output.key, row
            by_speaker.setdefault(speaker, []).append(entry)
    queues = [sorted(by_speaker[speaker]) for speaker in sorted(by_speaker)]
    turns = (each for turn in zip_longest(*queues) for each in turn if each is not None)
    total_ms = 0
    for _, _, duration_ms, key, row in turns:
        if total_ms >= limit_ms:
            break
        chosen[key][row] = True
        total_ms += duration_ms
    return chosen


T = TypeVar("T")

CHUNK_FRAMES = 32
# Rows are mixed within shuffle buffers of a training partition's usual two hours (003 IV-B4).
BUFFER_FRAMES = 240_000


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments of one minibatch: low-rate frames [starts, stops) of a buffer's utterances."""

    utterances: Int64[np.ndarray, " segments"]
    starts: Int64[np.ndarray, " segments"]
    stops: Int64[np.ndarray, " segments"]

    def take(self, chosen: slice | Int64[np.ndarray, " _chosen"]) -> "Segments":
        """Return some of the segments, in the order of `chosen`."""
        return Segments(self.utterances[chosen], self.starts[chosen], self.stops[chosen])


def concatenated(parts: Sequence[T]) -> T:
    """Join records of arrays, such as segments, in order; their other fields are all the same."""
    values: dict[str, Any] = {}
    for field in fields(cast(Any, parts[0])):
        column = [getattr(part, field.name) for part in parts]
        is_array = isinstance(column[0], np.ndarray)
        values[field.name] = np.concatenate(column) if is_array else column[0]
    return type(parts[0])(**values)


def group_into_buffers(parts: Iterable[T], num_frames: Callable[[T], int]) -> Iterator[list[T]]:
    """Group parts, in order, into shuffle buffers of about BUFFER_FRAMES frames.

    A buffer is complete when the next one begins, so no more parts are read than are needed.
    """
    buffer: list[T] = []
    number = start = 0
    for part in parts:
        if start // BUFFER_FRAMES != number:
            yield buffer
            buffer, number = [], start // BUFFER_FRAMES
        buffer.append(part)
        start += num_frames(part)
    if buffer:
        yield buffer


def chunked_minibatches(
    lengths: Int64[np.ndarray, " utterances"], minibatch_frames: int, generator: np.random.Generator
) -> list[Segments]:
    """Cut utterances into chunks of 32 frames, and put the chunks in random order (003 II-B)."""
    num_chunks = -(-lengths // CHUNK_FRAMES)
    utterances = np.repeat(np.arange(len(lengths)), num_chunks)
    first_chunks = np.cumsum(num_chunks) - num_chunks
    starts = (np.arange(len(utterances)) - first_chunks[utterances]) * CHUNK_FRAMES
    stops = np.minimum(starts + CHUNK_FRAMES, lengths[utterances])
    order = generator.permutation(len(utterances))
    chunks = Segments(utterances, starts, stops).take(order)
    size, _ = chunked_shape(minibatch_frames)
    return [chunks.take(slice(first, first + size)) for first in range(0, len(order), size)]


def chunked_shape(minibatch_frames: int) -> tuple[int, int]:
    """Return the chunks of a minibatch, and their frames; a buffer's last minibatch has fewer."""
    # 64 chunks are the papers' minibatch of 2,048 frames (000 3.2).
    return max(minibatch_frames // CHUNK_FRAMES, 1), CHUNK_FRAMES


def whole_utterance_minibatches(
    lengths: Int64[np.ndarray, " utterances"], minibatch_frames: int, generator: np.random.Generator
) -> list[Segments]:
    """Group utterances of like length to `minibatch_frames` with padding; shuffle the groups."""
    # Equal lengths keep their stored order, so whole utterances mix less than chunks.
    by_length = np.argsort(lengths, kind="stable")
    batches: list[list[int]] = []
    for utterance in by_length[lengths[by_length] > 0].tolist():
        # Lengths ascend, so the newest is the padded length of all.
        if not batches or (len(batches[-1]) + 1) * lengths[utterance] > minibatch_frames:
            batches.append([])
        batches[-1].append(utterance)
    whole = Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
    order = generator.permutation(len(batches))
    return [whole.take(np.array(batches[number], np.int64)) for number in order]


@dataclass(frozen=True, slots=True)
class RowOrder:
    """RowOrder holds a run's labelled and unlabelled training partitions, as one rank sees them.

    One labelled speaker in `validation_one_in` is left out of training, for the validation loss;
    with 0 none is, nor with partitions of development speakers, `development`. Of these about
    `validation_ms` are read, evenly from the speakers, or with 0 all.
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
    validation_ms: int = 0

    @property
    def is_validated(self) -> bool:
        """Return whether there are utterances for a validation loss."""
        return bool(self.development or self.validation_one_in)

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
        elif sub_epoch.is_validation and self.validation_ms:
            outputs, limit_ms = self.development, self.validation_ms
            spread = spread_rows(self.store, self.run_uri, outputs, limit_ms)
            rows = rows[spread[part.output.key][rows]]
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
