"""Batches of like length, which a task's requests alone decide."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from infra.devices.messages import Batch, PoolRequest, form_batches, padded_frames

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=60)


def batches(lengths: list[int], max_frames: int, look_ahead_frames: int = 10**6) -> list[Batch]:
    requests = (PoolRequest(length, b"") for length in lengths)
    return list(form_batches(enumerate(requests), max_frames, look_ahead_frames))


@given(LENGTHS, st.integers(1, 200), st.integers(1, 500))
def test_each_request_is_in_one_batch_that_fits(
    lengths: list[int], max_frames: int, look_ahead_frames: int
) -> None:
    """It is within the budget, with a fifth of padding at most, unless it is one request."""
    left = set(range(len(lengths)))
    for each in batches(lengths, max_frames, look_ahead_frames):
        assert each.numbers[0] == min(left), "the oldest waits for no other"
        assert len(each.numbers) == 1 or padded_frames(each.requests) <= max_frames
        assert padded_frames(each.requests) <= 1.25 * each.num_frames
        assert [request.num_frames for request in each.requests] == [
            lengths[number] for number in each.numbers
        ]
        left -= {*each.numbers}
    assert not left


@given(LENGTHS, st.integers(1, 200), st.integers(1, 500))
def test_no_batch_looks_farther_ahead(
    lengths: list[int], max_frames: int, look_ahead_frames: int
) -> None:
    """From the oldest request to the last one that was read, so that what waits is bounded."""
    read: list[int] = []

    def requests() -> Iterator[tuple[int, PoolRequest]]:
        for number, length in enumerate(lengths):
            read.append(max(1, length))
            yield number, PoolRequest(length, b"")

    for each in form_batches(requests(), max_frames, look_ahead_frames):
        oldest, last = each.numbers[0], max(each.numbers)
        assert last == oldest or sum(read[oldest : last + 1]) <= look_ahead_frames
        held = read[oldest:-1]  # the last one told that the look-ahead is full
        assert len(held) <= 1 or sum(held) <= look_ahead_frames


def test_lengths_that_differ_are_computed_apart() -> None:
    """Four of ten frames and four of a hundred are two batches, though all would fit in one."""
    found = [each.numbers for each in batches([10, 100] * 4, 1000)]
    assert found == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_like_lengths_are_together_as_far_as_the_budget_goes() -> None:
    """Of 100, 110, 90 and 105 frames the three that are nearest to the first fit into 330."""
    assert [each.numbers for each in batches([100, 110, 90, 105], 330)] == [[0, 3, 1], [2]]


def test_a_batch_is_divided_by_its_order() -> None:
    """Halves and singles keep the numbers with their requests."""
    (batch,) = batches([10, 11, 12, 13, 14], 1000)
    assert [each.numbers for each in batch.halves()] == [[0, 1], [2, 3, 4]]
    assert [[one.num_frames for one in each.requests] for each in batch.halves()] == [
        [10, 11],
        [12, 13, 14],
    ]
    assert [each.numbers for each in batch.singles()] == [[0], [1], [2], [3], [4]]
