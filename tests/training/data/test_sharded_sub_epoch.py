"""A sub-epoch is trained on once, frame by frame, though its number of ranks changes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from infra.store.object_store import ObjectStore
from tests.training.data.partition_rows import dataset_of, row, write
from training.data.dataset import Dataset
from training.data.sub_epoch_reader import SubEpochReader
from training.data.sub_epochs import DataCursor, SubEpoch
from training.distributed.simulated_group import simulate_ranks

Frames = Counter[tuple[float, ...]]


def take(
    group: ProcessGroup, sub_epoch: SubEpoch, cursor: DataCursor, dataset: Dataset, num_steps: int
) -> tuple[DataCursor, Frames]:
    """Take some steps on all ranks; return the cursor then, and the inputs that one rank saw."""
    own = replace(dataset, rank=group.rank(), world_size=group.size())
    reader = SubEpochReader(own, [sub_epoch] * 6, group)
    cursor, minibatches = reader.begin(cursor.resumed(group.size()))
    seen: Frames = Counter()
    for _ in range(min(num_steps, cursor.num_steps_left)):
        if (minibatch := next(minibatches, None)) is not None:
            for features, length in zip(minibatch.features, minibatch.lengths, strict=True):
                seen.update(map(tuple, features[:length].tolist()))
        cursor = cursor.stepped()
    return cursor, seen


@pytest.mark.parametrize("whole_utterances", [False, True])
@pytest.mark.parametrize("worlds", [[1], [2, 3], [3, 2, 4, 1], [4, 4, 1, 2]])
def test_every_frame_is_seen_once(
    tmp_path: Path, worlds: list[int], whole_utterances: bool
) -> None:
    """Two steps on each number of ranks, and to the end on the last; also the same number twice."""
    store = ObjectStore((str(tmp_path),))
    rows = [row(number, 60 + 25 * number, soft=True) for number in range(12)]
    output = write(store, str(tmp_path), "all", rows)
    dataset = dataset_of(store, str(tmp_path), [output])
    sub_epoch = SubEpoch(False, 0, 1, 0, whole_utterances, 0.1)
    ((_, expected),) = simulate_ranks(1, take, sub_epoch, DataCursor(5), dataset, 1000)
    cursor, seen = DataCursor(5), Counter()
    for number, num_ranks in enumerate(worlds, start=1):
        num_steps = 1000 if number == len(worlds) else 2
        results = simulate_ranks(num_ranks, take, sub_epoch, cursor, dataset, num_steps)
        assert len({reached for reached, _ in results}) == 1
        cursor = results[0][0]
        for _, frames in results:
            seen.update(frames)
    assert seen == expected
    assert cursor.num_steps_left == 0
