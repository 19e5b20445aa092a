"""An augmented sub-epoch: counted before it is read, the same bytes on any ranks, never validation.

Features of the rows are noise of their own, so that each frame names its utterance and its place.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS, STACK
from pipeline.shards import PartitionRow
from pipeline.splicing import num_low_rate_frames
from tests.training.data.partition_rows import dataset_in, row
from training.data.augmentation import Augmenter
from training.data.dataset import Dataset, SubEpochPlan, reshard
from training.data.minibatch import BufferFrames, Minibatch
from training.data.sub_epochs import SubEpoch
from training.fit.steps import VALIDATION
from training.settings.model_training import AugmentationConfig

pytestmark = pytest.mark.usefixtures("small_buffers")

MASKS = AugmentationConfig(time_masks=2, frequency_masks=2)
SPEEDS = AugmentationConfig(speed=(0.9, 1.0, 1.1))
BOTH = replace(MASKS, speed=SPEEDS.speed)
CHUNKS = SubEpoch(False, 0, 1, 0, False, 0.1)
UTTERANCES = replace(CHUNKS, whole_utterances=True)
LABELLED = SubEpoch(True, 0, 1, 2, True, 0.1)
NUM_ROWS = 20


def rows_of(soft: bool, numbers: Sequence[int] = range(NUM_ROWS)) -> list[PartitionRow]:
    """Utterances of 0 to 57 frames of noise."""
    return [
        replace(
            plain := row(number, 3 * number, soft),
            features=np.random.default_rng(number).normal(size=plain.features.shape).astype("f2"),
        )
        for number in numbers
    ]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """One rank's view of five partitions of each kind."""
    parts = [range(first, first + 4) for first in range(0, NUM_ROWS, 4)]
    made = dataset_in(
        tmp_path_factory.mktemp("augmented"),
        labelled=[rows_of(False, part) for part in parts],
        unlabelled=[rows_of(True, part) for part in parts],
    )
    return replace(made, minibatch_frames=256)


def segments(batch: Minibatch) -> Counter[tuple[bytes, bytes]]:
    """Inputs and best labels of each segment, without padding."""
    labels = getattr(batch.targets, "labels", None)
    labels = batch.targets.senones[..., 0] if labels is None else labels
    rows = zip(batch.features, labels, batch.lengths.tolist(), strict=True)
    return Counter((x[:n].numpy().tobytes(), y[:n].numpy().tobytes()) for x, y, n in rows)


def contents(plans: Sequence[SubEpochPlan]) -> Counter[tuple[bytes, bytes]]:
    return sum((segments(batch) for plan in plans for batch in plan.minibatches()), Counter())


def world(dataset: Dataset, sub_epoch: SubEpoch, index: int, num_ranks: int) -> list[SubEpochPlan]:
    ranks = (replace(dataset, rank=rank, world_size=num_ranks) for rank in range(num_ranks))
    return [rank.plan(sub_epoch, index) for rank in ranks]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.floats(0.5, 2), min_size=1, max_size=4).map(tuple),
    st.sampled_from([CHUNKS, UTTERANCES, LABELLED]),
    st.integers(0, 50),
)
def test_planned_lengths_are_read_lengths(dataset, speed, sub_epoch, index) -> None:
    """Minibatches are cut from lengths alone, and the features have exactly these."""
    augmented = replace(dataset, augmentation=AugmentationConfig(speed=speed, time_masks=1))
    for buffer in augmented.shuffle_buffers(sub_epoch, index):
        planned = np.concatenate([part.lengths for part in buffer.parts])
        frames = augmented.read(buffer)
        assert np.array_equal(planned, np.where(frames.counts, frames.counts + 3, 0))
        rows = len(getattr(frames.targets, "labels", getattr(frames.targets, "senones", ())))
        # Each part brings a row of padding.
        assert rows == len(frames.features) == len(buffer.parts) + frames.counts.sum()


@pytest.mark.parametrize("sub_epoch", [UTTERANCES, LABELLED])
@pytest.mark.parametrize("config", [MASKS, SPEEDS, BOTH])
def test_one_rank_and_three_read_the_same_bytes(
    dataset: Dataset, config: AugmentationConfig, sub_epoch: SubEpoch
) -> None:
    """Each utterance is augmented by its id alone, so its rank has no part in it."""
    augmented = replace(dataset, augmentation=config)
    one, three = (contents(world(augmented, sub_epoch, 7, ranks)) for ranks in (1, 3))
    assert one == three
    assert one != contents(world(dataset, sub_epoch, 7, 1))


def test_a_resumed_sub_epoch_is_augmented_alike(dataset: Dataset) -> None:
    """From any minibatch on, and on another number of ranks, each minibatch is the same."""
    augmented = replace(dataset, augmentation=BOTH)
    plans = world(augmented, CHUNKS, 7, 2)
    whole = [[segments(batch) for batch in plan.minibatches()] for plan in plans]
    for plan, batches in zip(plans, whole, strict=True):
        assert [segments(batch) for batch in plan.minibatches(2)] == batches[2:]
    taken_over = [
        reshard(replace(augmented, rank=rank, world_size=3), CHUNKS, 7, [[2, 2]])
        for rank in range(3)
    ]
    assert contents(taken_over) == sum(whole[0][2:] + whole[1][2:], Counter())


def test_validation_is_never_augmented(dataset: Dataset) -> None:
    """Losses of epochs are comparable: the utterances left out are read as they are stored."""
    held = replace(dataset, validation_one_in=4)
    augmented = replace(held, augmentation=BOTH)
    assert contents([augmented.plan(VALIDATION, 0)]) == contents([held.plan(VALIDATION, 0)])
    assert contents([augmented.plan(LABELLED, 0)]) != contents([held.plan(LABELLED, 0)])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2), st.integers(0, 100), st.booleans())
def test_masks_change_only_what_they_mask(offset: int, index: int, soft: bool) -> None:
    """Other cells and all targets keep their bits; a 10 ms frame is masked as one."""
    rows = rows_of(soft, range(14, 20))
    # Targets at one offset are read at no other one.
    offset = 0 if soft else offset
    plain = BufferFrames.of(rows, offset)
    made = BufferFrames.of(rows, offset, Augmenter(MASKS, 5, index))
    changed = made.features.view(np.uint16) != plain.features.view(np.uint16)
    assert not made.features[changed].any()
    assert not changed[0].any()
    for name in ("labels", "senones", "probabilities"):
        assert np.array_equal(getattr(made.targets, name, 0), getattr(plain.targets, name, 0))
    for each, first, count in zip(rows, made.firsts, made.counts, strict=True):
        kind_offset = each.offset if soft else offset
        assert count == num_low_rate_frames(len(each.features), kind_offset)
        cells = changed[first : first + count].reshape(STACK * count, NUM_BINS)
        frames, bins = cells.all(axis=1), cells.all(axis=0)
        assert np.array_equal(cells, frames[:, np.newaxis] | bins)
        assert frames.sum() <= 0.2 * STACK * count
        assert bins.sum() <= 20


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        AugmentationConfig(),
        AugmentationConfig(speed=(1.0, 1.0)),
        replace(BOTH, speed=(1.0,), time_masks=0, frequency_masks=0),
    ],
)
def test_without_masks_at_speed_1_every_bit_is_kept(config: AugmentationConfig, soft: bool) -> None:
    """The identity, also where the widths of masks that do not exist are set."""
    rows = [replace(each, features=-0.0 * each.features) for each in rows_of(soft)]
    made = BufferFrames.of(rows, 1, Augmenter(config, 5, 7))
    plain = BufferFrames.of(rows, 1)
    assert made.features.tobytes() == plain.features.tobytes()
    assert np.array_equal(made.counts, plain.counts)
