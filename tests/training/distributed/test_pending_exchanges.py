"""Exchanges that run while ranks work on: between real ranks, and the same between simulated."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, impatient
from training.distributed import collectives, process_group
from training.distributed.collectives import (
    Traffic,
    all_to_all,
    count_sent,
    start_receive,
    start_send,
    start_sum,
)
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks

TAG = 7


def exchange_on_a_ring(group: ProcessGroup) -> Tensor:
    """Send twice to the next rank, and receive in the order of the sends."""
    rank, size = group.rank(), group.size()
    sends = [
        start_send(torch.full((3,), float(10 * number + rank)), (rank + 1) % size, group, TAG)
        for number in range(2)
    ]
    receives = [start_receive(torch.empty(3), (rank - 1) % size, group, TAG) for _ in range(2)]
    received = torch.stack([receive.wait() for receive in receives])
    for send in sends:
        send.wait()
    return received


def exchange_parts(group: ProcessGroup) -> list[list[float]]:
    """Give rank k, from rank i, k values i + k / 10; none to rank 0."""
    rank, size = group.rank(), group.size()
    parts = [torch.full((other,), rank + other / 10) for other in range(size)]
    return [part.tolist() for part in all_to_all(parts, [rank] * size, group, "x")]


def sums_started_together(group: ProcessGroup) -> Tensor:
    """Start two sums and a third that blocks, and take the results in another order."""
    generator = torch.Generator().manual_seed(group.rank())
    first, second, third = (torch.randn(1001, generator=generator) for _ in range(3))
    pending = [start_sum(first, group, "first"), start_sum(second, group, "second")]
    collectives.all_reduce_sum(third, group)
    return torch.stack([third, pending[1].wait(), pending[0].wait()])


def count_bytes(group: ProcessGroup) -> int:
    """Count one exchange of each kind, of 12 floats."""
    traffic, values = Traffic(), torch.zeros(12)
    with traffic.counting([group]):
        start_sum(values, group, "x").wait()
        ring = [start_send(values, (group.rank() + 1) % group.size(), group, TAG)]
        ring.append(start_receive(torch.empty(12), (group.rank() - 1) % group.size(), group, TAG))
        for each in ring:
            each.wait()
        parts = [torch.zeros(3) for _ in range(group.size())]
        all_to_all(parts, [3] * group.size(), group, "x")
        collectives.broadcast(values, group)
    return traffic.num_bytes


def look_before_and_after(group: ProcessGroup) -> tuple[bool, bool]:
    """Look at a receive before its send, and after it."""
    if group.rank() == 1:
        collectives.barrier(group)
        start_send(torch.ones(2), 0, group, TAG).wait()
        return False, True
    receive = start_receive(torch.empty(2), 1, group, TAG)
    before = receive.is_done()
    collectives.barrier(group)
    receive.wait()
    return before, receive.is_done()


def receive_in_vain(group: ProcessGroup) -> str:
    group = impatient()
    if group.rank() == 0:
        try:
            start_receive(torch.empty(2), 1, group, TAG).wait()
        except process_group.CollectiveError as error:
            return str(error)
    else:
        time.sleep(3)
    return ""


SCENARIOS: dict[str, Callable[[ProcessGroup], Any]] = {
    "ring": exchange_on_a_ring,
    "parts": exchange_parts,
    "sums": sums_started_together,
    "bytes": count_bytes,
    "looks": look_before_and_after,
}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_simulated_exchanges_equal_real_ones(rank_pool: RankPool, name: str) -> None:
    """Every kind of exchange gives simulated ranks what it gives real ones, bit for bit."""
    num_ranks = 2 if name == "looks" else 4
    simulated = simulate_ranks(num_ranks, SCENARIOS[name])
    real = rank_pool.run(num_ranks, SCENARIOS[name])
    for one, other in zip(simulated, real, strict=True):
        assert all_equal([one, other]) if isinstance(one, Tensor) else one == other


def test_messages_of_a_tag_arrive_in_order(rank_pool: RankPool) -> None:
    """The n-th receive of a tag has the n-th message that its sender has sent."""
    for rank, received in enumerate(rank_pool.run(4, exchange_on_a_ring)):
        sender = (rank - 1) % 4
        assert received.tolist() == [[sender] * 3, [10 + sender] * 3]


def test_parts_are_of_any_length(rank_pool: RankPool) -> None:
    """Rank k has k values of each rank in rank order; rank 0 has empty parts alone."""
    for rank, parts in enumerate(rank_pool.run(4, exchange_parts)):
        expected = [torch.full((rank,), other + rank / 10).tolist() for other in range(4)]
        assert parts == expected


def test_counts_what_is_given() -> None:
    """48 bytes each of the sum and the send, 36 of the all-to-all; 48 of the broadcast's root."""
    assert simulate_ranks(4, count_bytes) == [48 + 48 + 36 + 48, *[48 + 48 + 36] * 3]


def test_a_receive_is_not_done_before_its_message(rank_pool: RankPool) -> None:
    """`is_done` is False before the send and True once the message was read."""
    assert rank_pool.run(2, look_before_and_after)[0] == (False, True)


def test_a_receive_waits_no_longer_than_the_limit(rank_pool: RankPool) -> None:
    """A receive without a send fails within the group's limit, and names both ranks."""
    message = rank_pool.run(2, receive_in_vain)[0]
    assert "receive from rank 1 failed on rank 0 of 2" in message


def test_refuses_parts_of_another_length() -> None:
    """A rank that expects other lengths than ranks send gets an error that names both."""
    with pytest.raises(process_group.CollectiveError, match=r"\[1, 1\] values .* expects \[2, 2\]"):
        simulate_ranks(2, expect_more)


def expect_more(group: ProcessGroup) -> None:
    all_to_all([torch.zeros(1)] * 2, [2, 2], group, "x")


NUM_THREADS, NUM_MESSAGES = 4, 20_000


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads interrupt each other between any two instructions, or nearly."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


def in_threads(send: Callable[[], None]) -> None:
    """Send many messages in each of some threads."""

    def work() -> None:
        for _ in range(NUM_MESSAGES):
            send()

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for running in [threads.submit(work) for _ in range(NUM_THREADS)]:
            running.result()


@pytest.mark.usefixtures("frequent_switches")
def test_messages_of_a_group_are_all_counted() -> None:
    """Of a thread beside the steps, too, and those that no group counts."""

    def scenario(group: SimulatedGroup) -> int:
        traffic = Traffic()
        with traffic.counting([group]):
            in_threads(lambda: count_sent(3, group))
        in_threads(lambda: traffic.add(5))
        return traffic.num_bytes

    assert simulate_ranks(2, scenario) == [8 * NUM_THREADS * NUM_MESSAGES] * 2
