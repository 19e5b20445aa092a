"""Sharding gives each row to one rank of one share, from few partitions a rank."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runs.manifest import Output
from training.data.row_order import shard_partitions
from training.data.sub_epochs import SubEpoch


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_every_row_is_in_exactly_one_slice(
    num_outputs: int, world_size: int, num_shares: int
) -> None:
    """Over all shares and ranks, each of a partition's 50 rows belongs to one slice."""
    outputs = [Output(str(number), 0, "", 0, 0) for number in range(num_outputs)]
    counts = Counter(
        (part.output.key, number)
        for share in range(num_shares)
        for rank in range(world_size)
        for part in shard_partitions(
            outputs, SubEpoch(True, share, num_shares, 0, False, 0.1), rank, world_size
        )
        for number in range(50)[part.first :: part.step]
    )
    assert set(counts.values()) == {1}
    assert len(counts) == 50 * num_outputs


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 9))
def test_ranks_read_few_partitions_for_what_they_use(
    num_outputs: int, world_size: int, num_shares: int
) -> None:
    """A rank reads whole partitions from four on; else slices of about 16, or of all there are."""
    outputs = [Output(str(number), 0, "", 0, 0) for number in range(num_outputs)]
    num_parts = world_size * num_shares
    for rank in range(world_size):
        slices = shard_partitions(
            outputs, SubEpoch(True, 0, num_shares, 0, False, 0.1), rank, world_size
        )
        read = {part.output.key for part in slices}
        assert len(read) == len(slices)
        if num_outputs >= 4 * num_parts:
            assert {part.step for part in slices} == {1}
        else:
            assert min(16, num_outputs) <= len(slices) <= 20
            used = sum(1 / part.step for part in slices) * num_parts / num_outputs
            assert abs(used - 1) < 1 / 15
