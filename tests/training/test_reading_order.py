"""Compare the certificate's reading order with the trainer's own, segment by segment."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import read_output
from pipeline.shards import read_partition
from pipeline.steps.repartition import RepartitionConfig, repartition
from tests.small_corpus import local_store, serially
from tests.written_run import write_run
from training.certificate import rank_steps, sub_epoch_steps
from training.data import row_order
from training.data.dataset import Dataset
from training.data.sub_epochs import SubEpoch


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Write six files of 12 utterances in about 9 partitions."""
    store, run_uri, _ = local_store(tmp_path_factory.mktemp("dataset"))
    write_run(store, run_uri, num_files=6, num_speakers=3, num_each=4, seed=2)
    config = RepartitionConfig(2 / 3600, 2, 5)
    outputs = repartition(store, run_uri, config, serially).manifest.outputs
    return Dataset(store, run_uri, (), outputs, 3, 64, 5, 0, 2)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])  # whole partitions, and rows of each
@pytest.mark.parametrize("buffer_frames", [40, 240_000])
def test_the_order_is_the_one_that_the_trainer_reads(
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
    world_size: int,
    buffer_frames: int,
) -> None:
    """The features of each segment's partition, row and start are the minibatch's."""
    monkeypatch.setattr(row_order, "BUFFER_FRAMES", buffer_frames)
    sub_epoch = SubEpoch(False, 1, 2, 0, whole, 0.1)
    partitions = {
        output.key: read_partition(read_output(dataset.store, dataset.run_uri, output))
        for output in dataset.unlabelled
    }
    for rank in range(world_size):
        ranks = replace(dataset, rank=rank, world_size=world_size)
        located = list(rank_steps(ranks, sub_epoch, 3))
        minibatches = list(ranks.plan(sub_epoch, 3).minibatches())
        assert len(located) == len(minibatches)
        for found, minibatch in zip(located, minibatches, strict=True):
            rows = [
                partitions[output.key][row]
                for output, row in zip(found.partitions, found.rows, strict=True)
            ]
            # All frames of an utterance are its level in this corpus.
            levels = torch.tensor([float(row.features[0, 0]) for row in rows])
            torch.testing.assert_close(minibatch.features[:, 0, 0], levels)
            ends = [len(row.features) // 3 + 3 for row in rows]
            left = [end - start for end, start in zip(ends, found.starts, strict=True)]
            expected = left if whole else [min(frames, 32) for frames in left]
            assert minibatch.lengths.tolist() == expected


def test_all_steps_of_all_ranks_read_each_utterance_once(dataset: Dataset) -> None:
    """All steps read each utterance once; a rank without data is missing from a step."""
    dataset = replace(dataset, world_size=3)
    steps = list(sub_epoch_steps(dataset, SubEpoch(False, 0, 1, 0, True, 0.1), 0))
    read = Counter(
        (output.key, row)
        for step in steps
        for minibatch in step
        for output, row in zip(minibatch.partitions, minibatch.rows.tolist(), strict=True)
    )
    assert set(read.values()) == {1}
    assert len(read) == 6 * 12
    plans = (
        replace(dataset, rank=rank).plan(SubEpoch(False, 0, 1, 0, True, 0.1), 0)
        for rank in range(3)
    )
    counts = [plan.num_minibatches() for plan in plans]
    assert [len(step) for step in steps] == [
        sum(count > number for count in counts) for number in range(max(counts))
    ]


def test_the_first_steps_read_few_partitions(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step opens two partitions, not all of the sub-epoch's."""
    monkeypatch.setattr(row_order, "BUFFER_FRAMES", 40)
    opened = []

    def counting(store: ObjectStore, uri: str):
        opened.append(uri)
        return plainly(store, uri)

    plainly = ObjectStore.open
    monkeypatch.setattr(ObjectStore, "open", counting)
    dataset = replace(dataset, world_size=1)
    next(sub_epoch_steps(dataset, SubEpoch(False, 0, 1, 0, False, 0.1), 0))
    assert len(opened) == 2
    assert len(dataset.unlabelled) > 5


def test_rows_are_indices_into_the_stored_partition(dataset: Dataset) -> None:
    """If four ranks share a partition row by row, rank 2 has every fourth row."""
    dataset = replace(dataset, world_size=4)
    found = [
        np.unique(minibatch.rows % 4)
        for minibatch in rank_steps(
            replace(dataset, rank=2), SubEpoch(False, 0, 1, 0, False, 0.1), 0
        )
    ]
    assert all(rows.tolist() == [2] for rows in found)
