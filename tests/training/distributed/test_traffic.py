"""Bytes are counted whatever threads send them."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from training.distributed.collectives import Traffic, count_sent
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks

NUM_THREADS, NUM_MESSAGES = 4, 20_000


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
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


def test_messages_of_a_group_are_all_counted() -> None:
    """Of a thread beside the steps, too."""

    def scenario(group: SimulatedGroup) -> tuple[int, int]:
        traffic = Traffic()
        with traffic.counting([group]):
            in_threads(lambda: count_sent(3, group, 5))
        return traffic.num_bytes, traffic.num_wire_bytes

    sent = NUM_THREADS * NUM_MESSAGES
    assert simulate_ranks(2, scenario) == [(3 * sent, 5 * sent)] * 2


def test_messages_beside_are_all_added() -> None:
    """Those that a trainer's own thread sends, which no group counts."""
    traffic = Traffic()
    in_threads(lambda: traffic.add(3, 5))
    sent = NUM_THREADS * NUM_MESSAGES
    assert (traffic.num_bytes, traffic.num_wire_bytes) == (3 * sent, 5 * sent)
