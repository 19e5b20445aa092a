"""A model that trains on some placements reads the rows at these, and no other one's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.shards import PartitionRow
from tests.training.data.partition_rows import dataset_in, row
from training.data.dataset import Dataset, SubEpochPlan
from training.data.sub_epochs import SubEpoch
from training.fit.steps import VALIDATION
from training.settings.model_training import AugmentationConfig

pytestmark = pytest.mark.usefixtures("small_buffers")

PLACEMENTS = ("clean", "DP1", "DP3", None)
EVERY = AugmentationConfig(placements=("clean", "DP1", "DP3", "all"))
SOME = AugmentationConfig(placements=("DP1", "clean"))
NUM_ROWS, ROWS_A_PARTITION = 30, 6
KEPT = {number for number in range(NUM_ROWS) if PLACEMENTS[number % 4] in SOME.placements}


def rows_at(numbers: Sequence[int], soft: bool) -> list[PartitionRow]:
    """Utterances of some 30 to 59 frames, whose features show their numbers."""
    return [replace(row(n, 30 + n % 30, soft), placement=PLACEMENTS[n % 4]) for n in numbers]


def write_dataset(folder: Path, numbers: set[int]) -> Dataset:
    """One rank's view of the rows with these numbers, in five partitions of each kind."""
    parts = [
        [each for each in range(first, first + ROWS_A_PARTITION) if each in numbers]
        for first in range(0, NUM_ROWS, ROWS_A_PARTITION)
    ]
    return dataset_in(
        folder,
        labelled=[rows_at(part, False) for part in parts],
        unlabelled=[rows_at(part, True) for part in parts],
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("whole"), {*range(NUM_ROWS)})


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The same partitions, which hold the rows at clean and DP1 alone."""
    return write_dataset(tmp_path_factory.mktemp("filtered"), KEPT)


@st.composite
def places(draw: st.DrawFn) -> tuple[SubEpoch, int, int, int]:
    """Draw a sub-epoch with its number, and a rank of some."""
    num_ranks, num_shares = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    labelled, whole = draw(st.booleans()), draw(st.booleans())
    share = draw(st.integers(0, num_shares - 1))
    sub_epoch = SubEpoch(labelled, share, num_shares, 0, whole, 0.1)
    return sub_epoch, draw(st.integers(0, 5)), draw(st.integers(0, num_ranks - 1)), num_ranks


def plan(
    dataset: Dataset, config: AugmentationConfig, place: tuple[SubEpoch, int, int, int]
) -> SubEpochPlan:
    sub_epoch, index, rank, num_ranks = place
    of_rank = replace(dataset, augmentation=config, rank=rank, world_size=num_ranks)
    return of_rank.plan(sub_epoch, index)


def order(found: SubEpochPlan) -> list[tuple[str, list[int]]]:
    """Return the partitions and rows of the shuffle buffers, in order."""
    parts = (part for buffer, _ in found.pieces for part in buffer.parts)
    return [(part.output.key, part.rows.tolist()) for part in parts]


def inputs(found: SubEpochPlan) -> list[torch.Tensor]:
    return [batch.features for batch in found.minibatches()]


def numbers(found: SubEpochPlan) -> list[int]:
    """Return the numbers of the utterances, each as often as rows of a buffer have it."""
    return [
        int(frames[0])
        for buffer, _ in found.pieces
        for part in [found.dataset.read(buffer)]
        for frames in part.features[part.firsts][:, 1:2].tolist()
    ]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@settings(max_examples=15, deadline=None)
@given(places())
def test_with_all_placements_named_the_order_is_the_default(whole: Dataset, place) -> None:
    """Partitions, rows and minibatches are the same, whatever the ranks, shares and forms."""
    default, named = (plan(whole, config, place) for config in (AugmentationConfig(), EVERY))
    assert order(named) == order(default)
    assert equal(inputs(named), inputs(default))


@settings(max_examples=15, deadline=None)
@given(places())
def test_some_placements_are_read_as_from_partitions_of_these(
    whole: Dataset, filtered: Dataset, place
) -> None:
    """Partitions that hold no other row give the same minibatches: rows are chosen, then dealt."""
    chosen, alone = plan(whole, SOME, place), plan(filtered, AugmentationConfig(), place)
    assert chosen.num_minibatches() == alone.num_minibatches()
    assert equal(inputs(chosen), inputs(alone))


def test_validation_hears_all_placements(whole: Dataset) -> None:
    """Losses of models that train on different placements can be compared."""
    newbob = replace(whole, augmentation=SOME, development=whole.labelled, validation_one_in=2)
    assert sorted(numbers(newbob.plan(VALIDATION, 0))) == [*range(NUM_ROWS)]


def test_left_out_speakers_are_trained_on_at_no_placement(whole: Dataset) -> None:
    """Of one speaker every second one validates; training reads the others at its placements."""
    newbob = replace(whole, augmentation=SOME, validation_one_in=2)
    training = SubEpoch(True, 0, 1, 0, True, 0.1)
    validated = set(numbers(newbob.plan(VALIDATION, 0)))
    assert len(validated) == NUM_ROWS // 2
    assert set(numbers(newbob.plan(training, 0))) == KEPT - validated != set()
