"""Training partitions to minibatches: each utterance once a visit over all ranks (003 V-D)."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from infra.prefetch import look_ahead
from infra.store.checked_reads import scan_checked
from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import read_partition, read_partition_lengths
from training.data.batching import (
    Pieces,
    chunked_minibatches,
    pools,
    whole_utterance_minibatches,
)
from training.data.minibatch import Minibatch, PoolFrames
from training.data.sharding import Lengths, Slice, deal
from training.data.sub_epochs import Visit


@dataclass(frozen=True, slots=True)
class Dataset:
    """The labelled and unlabelled training partitions of a run, as one rank sees them.

    Rows 0, n, 2n, ... of labelled partitions, n = `validation_one_in`, are left out of training;
    with n = 0 none is.
    """

    store: ObjectStore
    run_uri: str
    labelled: tuple[Output, ...]
    unlabelled: tuple[Output, ...]
    look_ahead: int
    minibatch_frames: int
    seed: int
    rank: int
    world_size: int
    validation_one_in: int = 0

    def plan(
        self, visit: Visit, index: int, lengths_of: Callable[[Output], Lengths] | None = None
    ) -> "VisitPlan":
        """Fix what this rank reads in visit number `index`, and in which order."""
        pools_of_visit = self.pools(visit, index, lengths_of)
        return VisitPlan(visit, [Stretch.whole(pool) for pool in pools_of_visit])

    def pools(
        self, visit: Visit, index: int, lengths_of: Callable[[Output], Lengths] | None = None
    ) -> Iterator["Pool"]:
        """What this rank mixes at a time in visit number `index`; reads lengths as it goes.

        `lengths_of` stands in for `self.lengths` where they were read before.
        """
        lengths_of = lengths_of or self.lengths
        slices = self.slices(visit)
        generator = np.random.default_rng([self.seed, index, self.rank])
        kept: list[PoolPart] = []

        def num_frames() -> Iterator[int]:
            for number in generator.permutation(len(slices)):
                part = slices[number]
                counts = lengths_of(part.output).low_rate(visit, self.look_ahead)
                rows = self.rows(part, visit, len(counts))
                if len(rows):
                    kept.append(PoolPart(part.output, rows, counts[rows]))
                    yield int(kept[-1].lengths.sum())

        for first, last in pools(num_frames()):
            yield Pool(self, visit, index, first, kept[first:last])

    def slices(self, visit: Visit) -> list[Slice]:
        """Deal this rank its part; a share holds the same rows in each pass."""
        outputs = self.labelled if visit.labelled else self.unlabelled
        return deal(outputs, visit, self.rank, self.world_size)

    def lengths(self, output: Output) -> Lengths:
        """The lengths of a partition's rows: one column is read, no feature."""
        uri = join_uri(self.run_uri, output.key)
        return Lengths(*scan_checked(self.store, uri, read_partition_lengths))

    def rows(self, part: Slice, visit: Visit, num_rows: int) -> Int64[np.ndarray, " rows"]:
        """Which of the partition's rows one slice has in `visit`, in stored order."""
        rows = np.arange(num_rows)
        if visit.labelled and self.validation_one_in:
            rows = rows[(rows % self.validation_one_in == 0) == visit.is_validation]
        dealt: Int64[np.ndarray, " rows"] = rows[part.first :: part.step]
        return dealt


@dataclass(frozen=True, slots=True, eq=False)
class PoolPart:
    """Rows of one partition, and their low-rate frames, look-ahead included."""

    output: Output
    rows: Int64[np.ndarray, " _rows"]
    lengths: Int64[np.ndarray, " _rows"]


@dataclass(frozen=True, slots=True)
class Pool:
    """What one rank holds at a time, its rows mixed; its first part is the visit's `first`."""

    dataset: Dataset
    visit: Visit
    index: int
    first: int
    parts: list[PoolPart]

    def batches(self) -> list[Pieces]:
        """The pieces of each minibatch; utterances are counted over all parts, in order."""
        key = [self.dataset.seed, self.index, self.dataset.rank, self.first]
        form = whole_utterance_minibatches if self.visit.whole_utterances else chunked_minibatches
        lengths = np.concatenate([part.lengths for part in self.parts])
        return form(lengths, self.dataset.minibatch_frames, np.random.default_rng(key))

    def read(self) -> PoolFrames:
        """Fetch, decode and join the parts; of the partitions, one is in memory at a time."""
        return PoolFrames.join([self._read(part) for part in self.parts])

    def _read(self, part: PoolPart) -> PoolFrames:
        data = read_output(self.dataset.store, self.dataset.run_uri, part.output)
        return PoolFrames.of(read_partition(data, part.rows.tolist()), self.visit.offset)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Minibatches [first, last) of one pool."""

    pool: Pool
    first: int
    last: int

    @classmethod
    def whole(cls, pool: Pool) -> "Stretch":
        """All minibatches of a pool."""
        return cls(pool, 0, len(pool.batches()))

    def __len__(self) -> int:
        return self.last - self.first

    def cut(self, first: int, last: int) -> "Stretch":
        """Its own minibatches [first, last), or those of them that there are."""
        begin = min(max(self.first + first, self.first), self.last)
        return Stretch(self.pool, begin, min(max(self.first + last, begin), self.last))

    def minibatches(self, frames: PoolFrames) -> Iterator[Minibatch]:
        """The minibatches, from the pool's frames."""
        for pieces in self.pool.batches()[self.first : self.last]:
            yield frames.minibatch(pieces, self.pool.dataset.look_ahead)


@dataclass(frozen=True, slots=True)
class VisitPlan:
    """One rank's part of one visit: its minibatches can be counted before any audio is read."""

    visit: Visit
    stretches: list[Stretch]

    def num_minibatches(self) -> int:
        """How many minibatches this rank has."""
        return sum(map(len, self.stretches))

    def minibatches(self, start: int = 0, pools_ahead: int = 1) -> Generator[Minibatch, None, None]:
        """The minibatches from number `start` on; none if there are no more.

        While one pool is trained on, threads read the next `pools_ahead`: no more are in memory.
        A thread's error is raised here; closing the iterator ends the threads.
        """
        if start < 0:
            raise ValueError(f"start = {start}: need the number of a minibatch, from 0 on")
        if pools_ahead < 1:
            raise ValueError(f"pools_ahead = {pools_ahead}: need at least 1")
        rest = self.cut(start, self.num_minibatches()).stretches
        # With a thread more, the first pool would share its core with the second.
        ahead = look_ahead(_read, rest, pools_ahead + 1, num_threads=pools_ahead)
        with closing(ahead):
            for stretch, frames in ahead:
                yield from stretch.minibatches(frames)
                del frames  # before the next one is waited for

    def cut(self, first: int, last: int) -> "VisitPlan":
        """Only the minibatches [first, last), or those of them that there are."""
        stretches, begin = [], 0
        for stretch in self.stretches:
            inner = stretch.cut(first - begin, last - begin)
            if len(inner):
                stretches.append(inner)
            begin += len(stretch)
        return VisitPlan(self.visit, stretches)


def _read(stretch: Stretch) -> PoolFrames:
    return stretch.pool.read()
