"""The requests that wait for a device, and the batches that are made of them."""

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infra.devices.request_queue import Batch, Request, RequestQueue, choose_batch

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=30)


def requests(lengths: list[int], client: int = 0) -> list[Request]:
    return [Request(client, number, length, b"") for number, length in enumerate(lengths)]


def filled(lengths: list[int]) -> RequestQueue:
    queue = RequestQueue()
    for each in requests(lengths):
        queue.put(each)
    return queue


def numbers(batch: Batch) -> list[int]:
    return [each.number for each in batch.requests]


@given(lengths, st.integers(1, 200))
def test_a_batch_has_the_oldest_and_fits(lengths: list[int], max_frames: int) -> None:
    """It is within the budget, with a fifth of padding at most, unless it is one request."""
    batch = choose_batch(requests(lengths), max_frames)
    assert batch[0].number == 0
    assert len({each.number for each in batch}) == len(batch)
    padded = len(batch) * max(each.num_frames for each in batch)
    assert len(batch) == 1 or padded <= max_frames
    assert padded <= 1.25 * sum(each.num_frames for each in batch)


@given(lengths, st.integers(1, 200))
def test_every_request_is_taken_once(lengths: list[int], max_frames: int) -> None:
    """The oldest is in the next batch, so that none waits for more than were before it."""
    queue = filled(lengths)
    taken: list[int] = []
    while queue.num_frames or len(taken) < len(lengths):
        left = min(set(range(len(lengths))) - set(taken))
        batch = numbers(queue.take(max_frames))
        assert batch[0] == left
        taken += batch
    assert sorted(taken) == list(range(len(lengths)))


def test_lengths_that_differ_are_computed_apart() -> None:
    """Four of ten frames and four of a hundred are two batches, though all would fit in one."""
    queue = filled([10, 100] * 4)
    assert numbers(queue.take(1000)) == [0, 2, 4, 6]
    assert numbers(queue.take(1000)) == [1, 3, 5, 7]


def test_like_lengths_are_merged_as_far_as_the_budget_goes() -> None:
    """Of 100, 110, 90 and 105 frames the three that are nearest to the first fit into 330."""
    queue = filled([100, 110, 90, 105])
    assert numbers(queue.take(330)) == [0, 3, 1]


def test_what_failed_together_comes_back_as_it_is_and_first() -> None:
    """A fixed batch is merged with nothing; what is put back is merged again, as the oldest."""
    queue = filled([10, 10])
    (first, second) = queue.take(100).requests
    queue.put(Request(0, 7, 10, b""))
    queue.put_batch(Batch([second], is_isolated=True))
    queue.put_back(Batch([first]))
    isolated = queue.take(100)
    assert isolated.is_isolated
    assert numbers(isolated) == [1]
    assert numbers(queue.take(100)) == [0, 7]
    assert queue.num_frames == 0


def test_a_client_that_is_gone_leaves_nothing() -> None:
    """Its requests are taken out, from batches that are fixed too; others remain."""
    queue = RequestQueue()
    for client in (1, 2):
        for each in requests([10, 20], client):
            queue.put(each)
    queue.put_batch(Batch([*requests([5], 1), *requests([6], 2)]))
    queue.put_batch(Batch(requests([7], 1)))
    queue.drop(1)
    assert queue.num_frames == 36
    left = [queue.take(10).requests[0] for _ in range(3)]
    assert Counter((each.client, each.num_frames) for each in left) == {
        (2, 6): 1,
        (2, 10): 1,
        (2, 20): 1,
    }


def test_an_empty_queue_is_waited_for() -> None:
    """A request that comes later is taken by who waits."""
    queue, taken = RequestQueue(), []
    thread = threading.Thread(target=lambda: taken.append(queue.take(100)))
    thread.start()
    queue.put(requests([10])[0])
    thread.join(10)
    assert numbers(taken[0]) == [0]
