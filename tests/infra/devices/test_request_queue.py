"""The batches that wait for a device."""

import threading

from infra.devices.batches import PoolRequest
from infra.devices.request_queue import QueuedBatch, RequestQueue


def batch(number: int, client: int = 0, num_frames: int = 10) -> QueuedBatch:
    return QueuedBatch(client, number, [PoolRequest(num_frames, b"")])


def test_batches_are_taken_in_their_order_and_as_they_are() -> None:
    """What is put back is the first again; none is merged with another."""
    queue = RequestQueue()
    every = [batch(number) for number in range(3)]
    for each in every:
        queue.put(each)
    assert queue.num_frames == 30
    first = queue.take()
    queue.put_first(first)
    assert [queue.take() for _ in every] == every
    assert queue.num_frames == 0


def test_a_client_that_is_gone_leaves_nothing() -> None:
    """Its batches are taken out; others remain."""
    queue = RequestQueue()
    for number in range(4):
        queue.put(batch(number, client=number % 2))
    queue.drop(1)
    assert queue.num_frames == 20
    assert [queue.take().number for _ in range(2)] == [0, 2]


def test_an_empty_queue_is_waited_for() -> None:
    """A batch that comes later is taken by who waits."""
    queue, taken = RequestQueue(), []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    queue.put(batch(7))
    thread.join(10)
    assert [each.number for each in taken] == [7]
