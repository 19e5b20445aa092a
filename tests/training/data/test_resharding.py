"""The rest of an interrupted sub-epoch over another number of ranks: each minibatch once."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup

from tests.training.data.partition_rows import dataset_in, row
from training.data.dataset import Dataset, SubEpochPlan, SubEpochReader, reshard
from training.data.sub_epochs import DataCursor, SubEpoch
from training.distributed.simulated_group import simulate_ranks

pytestmark = pytest.mark.usefixtures("small_buffers")

NUM_PARTITIONS = 10
INDEX = 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Ten partitions of five utterances."""
    parts = [[row(5 * n + m, 60 + 11 * m, True) for m in range(5)] for n in range(NUM_PARTITIONS)]
    return dataset_in(tmp_path_factory.mktemp("dataset"), unlabelled=parts)


def plans_of(dataset: Dataset, sub_epoch: SubEpoch, world_size: int) -> list[SubEpochPlan]:
    """The plans of all ranks of a world that begins the sub-epoch."""
    ranks = (replace(dataset, rank=rank, world_size=world_size) for rank in range(world_size))
    return [rank.plan(sub_epoch, INDEX) for rank in ranks]


def names(plan: SubEpochPlan) -> list[tuple[int, int, int]]:
    """Each minibatch by the rank that began the sub-epoch, its buffer and its number in that."""
    return [
        (buffer.order.rank, buffer.first, number)
        for buffer, numbers in plan.pieces
        for number in numbers
    ]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_each_minibatch_is_on_one_rank_whatever_the_worlds(dataset: Dataset, data) -> None:
    """Interrupted anywhere, up to three times, by any numbers of ranks; shares of the load even."""
    sub_epoch = SubEpoch(False, 0, data.draw(st.integers(1, 2)), 0, data.draw(st.booleans()), 0.1)
    worlds = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    plans = plans_of(dataset, sub_epoch, worlds[0])
    expected = Counter(name for plan in plans for name in names(plan))
    seen: Counter[tuple[int, int, int]] = Counter()
    done: list[list[int]] = []
    for world_size in worlds[1:]:
        # Steps are common to all ranks; a rank that runs out of data takes empty steps.
        steps = data.draw(st.integers(0, max(plan.num_minibatches() for plan in plans)))
        done.append([min(steps, plan.num_minibatches()) for plan in plans])
        for plan in plans:
            seen.update(names(plan)[:steps])
        plans = [
            reshard(replace(dataset, rank=rank, world_size=world_size), sub_epoch, INDEX, done)
            for rank in range(world_size)
        ]
        counts = [plan.num_minibatches() for plan in plans]
        assert max(counts) - min(counts) <= 1
    for plan in plans:
        seen.update(names(plan))
    assert seen == expected


def test_new_ranks_together_read_few_buffers_twice(dataset: Dataset, opened: list[str]) -> None:
    """A rank takes runs of minibatches: beside its own it shares a buffer with each neighbour."""
    sub_epoch = SubEpoch(False, 0, 1, 0, False, 0.1)
    for rank in range(3):
        taken_over = replace(dataset, rank=rank, world_size=3)
        list(reshard(taken_over, sub_epoch, INDEX, [[1] * 4]).minibatches())
    shuffle_buffers = [
        buffer.parts for plan in plans_of(dataset, sub_epoch, 4) for buffer, _ in plan.pieces
    ]
    assert len(opened) <= sum(map(len, shuffle_buffers)) + 2 * max(map(len, shuffle_buffers))


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
@pytest.mark.parametrize("worlds", [[2, 3], [3, 2, 4, 1], [4, 4, 1, 2]])
def test_every_frame_is_seen_once(
    tmp_path: Path, worlds: list[int], whole_utterances: bool
) -> None:
    """Two steps on each number of ranks, and to the end on the last; also the same number twice."""
    rows = [row(number, 60 + 25 * number, soft=True) for number in range(12)]
    dataset = dataset_in(tmp_path, unlabelled=[rows])
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


def test_other_ranks_take_over_what_is_left() -> None:
    """The cursor keeps what each rank took, at most what it had; the rest is counted again."""
    cursor = DataCursor(sub_epoch=3, counts=(5, 2))
    for _ in range(4):
        cursor = cursor.stepped()
    assert cursor.num_steps_left == 1
    assert cursor.resumed(2) == cursor
    taken_over = cursor.resumed(3)
    assert taken_over == DataCursor(3, ((4, 2),))
    assert taken_over.resumed(4) == taken_over  # killed before the rest was sharded
    later = replace(taken_over, counts=(1, 0, 0)).stepped().resumed(1)
    assert later == DataCursor(3, ((4, 2), (1, 0, 0)))
    assert later.next_sub_epoch() == DataCursor(4)
