"""Training partitions to minibatches: each utterance once a visit over all ranks (003 V-D)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from infra.checked_reads import scan_checked
from infra.object_store import ObjectStore, join_uri
from pipeline.kbest import soft_targets
from pipeline.shards import PartitionRow, read_partition, read_partition_lengths
from pipeline.splicing import num_low_rate_frames, splice
from pipeline.steps.manifest import Output, read_output
from training.batching import (
    Piece,
    chunked_minibatches,
    pools,
    whole_utterance_minibatches,
)
from training.losses import NO_LABEL
from training.schedule import Visit


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Padded inputs with hard labels, or with k-best senones and their probabilities."""

    features: Float[Tensor, "batch frames 192"]
    lengths: Int64[Tensor, " batch"]
    labels: Int64[Tensor, "batch frames"] | None
    senones: Int64[Tensor, "batch frames k"] | None
    probabilities: Float[Tensor, "batch frames k"] | None

    @property
    def num_frames(self) -> int:
        """Frames without padding."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows first, first + step, ... of one training partition."""

    output: Output
    first: int
    step: int


def deal(
    outputs: Sequence[Output], visit: Visit, rank: int, world_size: int, order: Sequence[int]
) -> list[Slice]:
    """One rank's part of a visit: whole partitions, or rows where partitions are too few.

    Over all ranks of all shares, every row of every partition is dealt exactly once.
    """
    num_pieces = visit.num_shares * world_size
    piece = visit.share + visit.num_shares * rank
    ordered = [outputs[index] for index in order]
    # With 4 partitions or more a piece, whole ones leave ranks within a quarter of each other.
    if len(ordered) >= 4 * num_pieces:
        return [Slice(output, 0, 1) for output in ordered[piece::num_pieces]]
    return [Slice(output, piece, num_pieces) for output in ordered]


@dataclass(frozen=True, slots=True)
class Dataset:
    """The labelled and unlabelled training partitions of a run, as one rank sees them."""

    store: ObjectStore
    run_uri: str
    labelled: tuple[Output, ...]
    unlabelled: tuple[Output, ...]
    look_ahead: int
    minibatch_frames: int
    seed: int
    rank: int
    world_size: int

    def plan(self, visit: Visit, index: int) -> "VisitPlan":
        """Fix what this rank reads in visit number `index`, and in which order."""
        return VisitPlan(visit, list(self.pools(visit, index)))

    def pools(self, visit: Visit, index: int) -> Iterator["Pool"]:
        """What this rank mixes at a time in visit number `index`; reads lengths as it goes."""
        outputs = self.labelled if visit.labelled else self.unlabelled
        # A share must hold the same rows in each pass, so the deal's order is not reshuffled.
        slices = deal(outputs, visit, self.rank, self.world_size, range(len(outputs)))
        generator = np.random.default_rng([self.seed, index, self.rank])
        kept: list[Slice] = []
        lengths: list[Int64[np.ndarray, " _rows"]] = []

        def num_frames() -> Iterator[int]:
            for number in generator.permutation(len(slices)):
                counts = self._lengths(slices[number], visit)
                if len(counts):
                    kept.append(slices[number])
                    lengths.append(counts)
                    yield int(counts.sum())

        for first, last in pools(num_frames()):
            yield Pool(self, visit, index, first, kept[first:last], lengths[first:last])

    def _lengths(self, part: Slice, visit: Visit) -> Int64[np.ndarray, " rows"]:
        uri = join_uri(self.run_uri, part.output.key)
        num_frames, offsets = scan_checked(self.store, uri, read_partition_lengths)
        if visit.labelled:
            offsets = np.full_like(offsets, visit.offset)
        counts = ((num_frames - offsets) // 3 + self.look_ahead).astype(np.int64)
        dealt: Int64[np.ndarray, " rows"] = counts[part.first :: part.step]
        return dealt

    def read(self, part: Slice) -> list[PartitionRow]:
        """The rows of one slice, in stored order."""
        rows = read_partition(read_output(self.store, self.run_uri, part.output))
        return rows[part.first :: part.step]


@dataclass(frozen=True, slots=True)
class Pool:
    """Slices that one rank holds at a time, their rows mixed; the first is the visit's `first`."""

    dataset: Dataset
    visit: Visit
    index: int
    first: int
    slices: list[Slice]
    lengths: list[Int64[np.ndarray, " _rows"]]

    def batches(self) -> list[list[Piece]]:
        """The pieces of each minibatch; utterances are counted over all slices, in order."""
        key = [self.dataset.seed, self.index, self.dataset.rank, self.first]
        form = whole_utterance_minibatches if self.visit.whole_utterances else chunked_minibatches
        lengths = np.concatenate(self.lengths)
        return form(lengths, self.dataset.minibatch_frames, np.random.default_rng(key))

    def minibatches(self) -> Iterator[Minibatch]:
        """Read the slices and yield the minibatches."""
        rows = [row for part in self.slices for row in self.dataset.read(part)]
        examples = [to_example(row, self.visit.offset, self.dataset.look_ahead) for row in rows]
        for pieces in self.batches():
            yield collate(examples, pieces)


@dataclass(frozen=True, slots=True)
class VisitPlan:
    """One rank's part of one visit: its minibatches can be counted before any audio is read."""

    visit: Visit
    pools: list[Pool]

    def num_minibatches(self) -> int:
        """How many minibatches this rank has."""
        return sum(len(pool.batches()) for pool in self.pools)

    def minibatches(self) -> Iterator[Minibatch]:
        """Read pool after pool and yield its minibatches."""
        for pool in self.pools:
            yield from pool.minibatches()


@dataclass(frozen=True, slots=True)
class Example:
    """One utterance's inputs and targets at low rate, delayed by the look-ahead."""

    features: Float[np.ndarray, "frames 192"]
    labels: Int64[np.ndarray, " frames"] | None
    senones: Int64[np.ndarray, "frames k"] | None
    probabilities: Float[np.ndarray, "frames k"] | None


def to_example(row: PartitionRow, visit_offset: int, look_ahead: int) -> Example:
    """Splice at the offset, repeat the last frame and delay the targets by `look_ahead`."""
    offset = visit_offset if row.kbest is None else row.offset
    num_frames = num_low_rate_frames(len(row.features), offset)
    spliced = splice(row.features, offset)
    features = np.concatenate([spliced, np.repeat(spliced[-1:], look_ahead, axis=0)])
    if row.kbest is not None:
        senones = np.pad(row.kbest.senones.astype(np.int64), ((look_ahead, 0), (0, 0)))
        probabilities = np.pad(soft_targets(row.kbest), ((look_ahead, 0), (0, 0)))
        return Example(features, None, senones, probabilities)
    assert row.alignment is not None, "a training partition's row has one kind of target"
    labels = row.alignment[offset + 1 :: 3][:num_frames].astype(np.int64)
    return Example(features, np.pad(labels, (look_ahead, 0), constant_values=NO_LABEL), None, None)


def collate(examples: Sequence[Example], pieces: Sequence[Piece]) -> Minibatch:
    """Pad the pieces at their ends; padding has no label and no probability."""
    parts = [examples[piece.utterance] for piece in pieces]
    spans = [slice(piece.start, piece.stop) for piece in pieces]

    def padded(arrays: list[np.ndarray], fill: int) -> Tensor:
        longest = max(len(array) for array in arrays)
        batch = np.full((len(arrays), longest, *arrays[0].shape[1:]), fill, arrays[0].dtype)
        for row, array in zip(batch, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(batch)

    features = padded([part.features[span] for part, span in zip(parts, spans, strict=True)], 0)
    lengths = torch.tensor([piece.stop - piece.start for piece in pieces])
    if parts[0].labels is not None:
        labels = [part.labels[span] for part, span in zip(parts, spans, strict=True)]  # type: ignore[index]
        return Minibatch(features.float(), lengths, padded(labels, NO_LABEL), None, None)
    senones = [part.senones[span] for part, span in zip(parts, spans, strict=True)]  # type: ignore[index]
    mass = [part.probabilities[span] for part, span in zip(parts, spans, strict=True)]  # type: ignore[index]
    return Minibatch(features.float(), lengths, None, padded(senones, 0), padded(mass, 0))
