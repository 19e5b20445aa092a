"""A rank's sub-epochs come one after the other, and the next one's first buffer is read ahead."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from infra.store.object_store import ObjectNotFound, ObjectStore
from tests.training.data.partition_rows import dataset_in, row
from training.data import row_order
from training.data.dataset import Dataset, SubEpochReader
from training.data.minibatch import Minibatch
from training.data.sub_epochs import DataCursor, SubEpoch
from training.distributed import process_group

SUB_EPOCHS = tuple(SubEpoch(False, 0, 1, 0, number == 2, 0.1) for number in range(3))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Two partitions of soft rows, each utterance with frames of its own."""
    parts = [[row(9 * part + n, 99, True) for n in range(9)] for part in range(2)]
    return dataset_in(tmp_path, unlabelled=parts)


@pytest.fixture
def reader(dataset: Dataset) -> Iterator[SubEpochReader]:
    """Read the three sub-epochs on one rank."""
    with process_group.open_world() as group:
        yield SubEpochReader(dataset, SUB_EPOCHS, group)


def frames(minibatches: list[Minibatch]) -> list[torch.Tensor]:
    """The minibatches' features, and how long they are."""
    return [each for batch in minibatches for each in (batch.features, batch.lengths)]


def wait_for(num_reads: int, opened: list[str]) -> None:
    """Wait until so many partitions have been read, and a little longer for one too many."""
    deadline = time.monotonic() + 20
    while len(opened) < num_reads and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)


@pytest.mark.parametrize("buffer_frames", [100, 240_000])
def test_reading_ahead_changes_no_bit(
    dataset: Dataset, reader: SubEpochReader, monkeypatch: pytest.MonkeyPatch, buffer_frames: int
) -> None:
    """Minibatches are those that each sub-epoch has alone, in one shuffle buffer or two."""
    monkeypatch.setattr(row_order, "BUFFER_FRAMES", buffer_frames)
    for index, sub_epoch in enumerate(SUB_EPOCHS):
        _, minibatches = reader.begin(DataCursor(index))
        with closing(minibatches):
            ahead = frames(list(minibatches))
        alone = frames(list(dataset.plan(sub_epoch, index).minibatches()))
        assert len(ahead) == len(alone) > 2
        assert all(map(torch.equal, ahead, alone))


def test_the_next_first_buffer_is_read_while_the_last_is_trained_on(
    reader: SubEpochReader, opened: list[str]
) -> None:
    """One buffer of two partitions a sub-epoch: four reads at the first minibatch, and no more."""
    for index, expected in ((0, 4), (1, 6), (2, 6)):
        cursor, minibatches = reader.begin(DataCursor(index))
        with closing(minibatches):
            next(minibatches)
            wait_for(expected, opened)
            assert len(opened) == expected
            # A rank takes its own minibatches, and asks for none beyond.
            for _ in range(cursor.num_steps_left - 1):
                next(minibatches)
    assert len(opened) == 6


def test_a_buffer_ahead_takes_the_place_of_another(
    reader: SubEpochReader, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    """With two buffers a sub-epoch, the next one's is read only while the second is trained on."""
    monkeypatch.setattr(row_order, "BUFFER_FRAMES", 100)
    cursor, minibatches = reader.begin(DataCursor())
    with closing(minibatches):
        next(minibatches)
        wait_for(2, opened)
        assert len(opened) == 2
        for _ in range(cursor.num_steps_left - 1):
            next(minibatches)
        wait_for(3, opened)
    assert len(opened) == 3


def test_only_the_sub_epoch_that_was_read_is_taken(
    dataset: Dataset, reader: SubEpochReader, opened: list[str]
) -> None:
    """A cursor within the next sub-epoch, or beyond it, gets what it asks for."""
    alone = [frames(list(dataset.plan(SUB_EPOCHS[n], n).minibatches())) for n in (1, 2)]
    opened.clear()
    for cursor, expected in ((DataCursor(1, (), (9,), 2), alone[0][4:]), (DataCursor(2), alone[1])):
        _, first = reader.begin(DataCursor())
        with closing(first):
            next(first)
            wait_for(4, opened)
        opened.clear()
        _, minibatches = reader.begin(cursor)
        with closing(minibatches):
            assert all(map(torch.equal, frames(list(minibatches)), expected))


def test_an_error_ahead_is_raised_where_its_sub_epoch_begins(
    reader: SubEpochReader, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    """The sub-epoch before is trained on whole, and saved; the store is not asked once more."""
    _, minibatches = reader.begin(DataCursor())
    with closing(minibatches):
        next(minibatches)
        wait_for(4, opened)
    asked: list[str] = []

    def failing(_: ObjectStore, uri: str) -> None:
        asked.append(uri)
        raise ObjectNotFound(f"{uri}: no such object")

    monkeypatch.setattr(ObjectStore, "open", failing)
    cursor, minibatches = reader.begin(DataCursor(1))  # it was read before
    with closing(minibatches):
        next(minibatches)
        wait_for(1, asked)
        assert len(list(minibatches)) == cursor.num_steps_left - 1 > 1
    with pytest.raises(ObjectNotFound, match="no such object"):
        reader.begin(DataCursor(2))
    assert len(asked) == 1
