"""Targets at all offsets: each pass reads the next offset, and three passes read every frame."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS, STACK
from pipeline.kbest import KBest
from pipeline.shards import KBestAtAllOffsets, PartitionRow
from tests.training.data.partition_rows import dataset_in, row, row_at_all_offsets
from training.data.dataset import Dataset, SubEpochPlan
from training.data.minibatch import Minibatch
from training.data.sub_epochs import SubEpoch, scheduled_learning_sub_epochs
from training.data.targets import HardTargets, SoftTargets
from training.models.losses import NO_LABEL
from training.settings.model_training import AugmentationConfig

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 40, 130)


def middles(number: int, num_frames: int) -> PartitionRow:
    """Utterance `number`, whose senone at any offset is the 10 ms frame in the middle."""
    plain = row(number, num_frames, soft=True)
    frames = np.arange(1, max(num_frames - 1, 1), dtype=np.uint16)[:, np.newaxis]
    kbest = KBest(frames, np.zeros_like(frames, np.float16), np.zeros(len(frames), np.float16))
    return replace(plain, targets=KBestAtAllOffsets(kbest))


def passes(whole: bool, number: int = 3) -> list[SubEpoch]:
    """The unlabelled sub-epochs of so many passes of one share each."""
    rates = [0.1] * number
    planned = scheduled_learning_sub_epochs(rates, 1, number * whole, 1.0, 1, rotates=True)
    return [each for each in planned if not each.labelled]


def frames_of(batches: Iterator[Minibatch], delay: int) -> Counter[tuple[int, int]]:
    """Utterance and middle frame of each target; inputs and targets must speak of one frame."""
    seen: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        assert isinstance(batch.targets, SoftTargets)
        features, senones = batch.features.numpy(), batch.targets.senones[..., 0].numpy()
        present = batch.targets.probabilities[..., 0].numpy() > 0
        # A target comes `delay` outputs after its input, which may be of a chunk before.
        spoken = features[:, : features.shape[1] - delay, NUM_BINS]
        late = present[:, delay:]
        assert np.array_equal(senones[:, delay:][late], spoken[late])
        utterances = features[..., 1][present].astype(int).tolist()
        seen.update(zip(utterances, senones[present].tolist(), strict=True))
    return seen


def bits(batches: Iterator[Minibatch]) -> list[tuple[bytes, ...]]:
    """All tensors of each minibatch."""
    found = []
    for batch in batches:
        assert isinstance(batch.targets, SoftTargets)
        tensors = batch.features, batch.lengths, batch.targets.senones, batch.targets.probabilities
        found.append(tuple(each.numpy().tobytes() for each in tensors))
    return found


def dataset(folder: Path | str, rows: Sequence[PartitionRow]) -> Dataset:
    """A dataset of two partitions that hold the rows in turn."""
    return dataset_in(folder, unlabelled=[part for part in (rows[::2], rows[1::2]) if part])


def world(dataset: Dataset, sub_epoch: SubEpoch, index: int, size: int) -> list[SubEpochPlan]:
    ranks = (replace(dataset, rank=rank, world_size=size) for rank in range(size))
    return [each.plan(sub_epoch, index) for each in ranks]


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.one_of(st.integers(0, 7), st.integers(8, 140)), min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 3),
)
def test_three_passes_read_each_frame_exactly_once(lengths, whole, num_ranks) -> None:
    """All frames that are the middle of a low-rate frame, of any length and on any ranks."""
    with TemporaryDirectory() as folder:
        made = dataset(folder, [middles(number, count) for number, count in enumerate(lengths)])
        seen: Counter[tuple[int, int]] = Counter()
        for index, sub_epoch in enumerate(passes(whole)):
            for plan in world(made, sub_epoch, index, num_ranks):
                seen += frames_of(plan.minibatches(), made.delay)
        expected = [
            (n, middle) for n, count in enumerate(lengths) for middle in range(1, count - 1)
        ]
        assert seen == Counter(expected)


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.integers(0, 140), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_the_best_target_labels_the_nearest_frames(lengths, at_all, whole, num_ranks) -> None:
    """At each offset, on any ranks; a frame is read once in three passes, as of soft targets."""
    stored, rows = [], []
    for number, num_frames in enumerate(lengths):
        every = middles(number, num_frames)
        assert isinstance(every.targets, KBestAtAllOffsets)
        one = replace(every, targets=every.targets.at(every.offset))
        rows.append(every if at_all else one)
        kept = every.targets.kbest if at_all else one.targets
        stored.append(kept.senones[:, 0].tolist())
    seen: Counter[tuple[int, int, int]] = Counter()
    with TemporaryDirectory() as folder:
        made = replace(dataset(folder, rows), soft_targets="best", delay=0)
        for index, sub_epoch in enumerate(passes(whole)):
            for plan in world(made, sub_epoch, index, num_ranks):
                for batch in plan.minibatches():
                    assert isinstance(batch.targets, HardTargets)
                    labels, features = batch.targets.labels.numpy(), batch.features.numpy()
                    there = labels != NO_LABEL
                    columns = features[there][:, [1, NUM_BINS]].astype(int)
                    seen.update(zip(*columns.T.tolist(), labels[there].tolist(), strict=True))
    expected = Counter(
        (n, middle, min(stored[n], key=lambda each: abs(each - middle)))
        for n, num_frames in enumerate(lengths)
        for middle in range(1, num_frames - 1)
        if stored[n]
    )
    assert seen == expected


@pytest.mark.parametrize("whole", [False, True])
def test_pass_0_reads_the_minibatches_of_targets_at_one_offset(tmp_path: Path, whole: bool) -> None:
    """Bit by bit; pass 3 has other minibatches of the same frames, and pass 1 other frames."""
    one = dataset(tmp_path / "one", [row(n, count, True) for n, count in enumerate(LENGTHS)])
    every = dataset(
        tmp_path / "all", [row_at_all_offsets(n, count) for n, count in enumerate(LENGTHS)]
    )
    fixed, rotating = SubEpoch(False, 0, 1, 0, whole, 0.1), passes(whole, 4)
    assert rotating[0] == replace(fixed, learning_rate=0.1)
    for index in (0, 3):
        expected = bits(one.plan(fixed, index).minibatches())
        assert bits(every.plan(rotating[index], index).minibatches()) == expected
    assert bits(every.plan(rotating[1], 0).minibatches()) != bits(one.plan(fixed, 0).minibatches())


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 2), st.integers(0, 30), st.sampled_from([(1.0,), (0.9, 1.0, 1.1), (0.5,)]))
def test_planned_lengths_are_read_lengths_at_every_offset(offset, index, speed) -> None:
    """Also where utterances change their speed, and with it their number of low-rate frames."""
    with TemporaryDirectory() as folder:
        made = dataset(folder, [middles(number, count) for number, count in enumerate(LENGTHS)])
        augmented = replace(made, augmentation=AugmentationConfig(speed=speed))
        sub_epoch = replace(passes(whole=True)[0], offset=offset)
        for buffer in augmented.shuffle_buffers(sub_epoch, index):
            frames = augmented.read(buffer)
            planned = np.concatenate([part.lengths for part in buffer.parts])
            assert np.array_equal(planned, np.where(frames.counts, frames.counts + 3, 0))
            assert len(frames.features) == len(buffer.parts) + frames.counts.sum()


@pytest.mark.parametrize("speed", [0.5, 1.25, 2.0])
def test_targets_follow_an_utterances_speed_to_the_nearest_frame(tmp_path: Path, speed) -> None:
    """A low-rate frame whose middle is t has the target of the stored frame nearest to speed t."""
    made = dataset(tmp_path, [middles(1, 130)])
    augmented = replace(made, augmentation=AugmentationConfig(speed=(speed,)))
    num_frames = int(129 / speed) + 1
    seen = []
    for index, sub_epoch in enumerate(passes(whole=True)):
        (batch,) = augmented.plan(sub_epoch, index).minibatches()
        assert isinstance(batch.targets, SoftTargets)
        senones = batch.targets.senones[0, 3:, 0].tolist()
        first = (1 + sub_epoch.offset) % STACK
        middle = first + 1 + STACK * np.arange(len(senones))
        assert np.array_equal(senones, np.rint(middle * speed).clip(1, 128))
        seen += middle.tolist()
    assert sorted(seen) == list(range(1, num_frames - 1))
