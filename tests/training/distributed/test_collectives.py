"""Exchanges between real ranks and between simulated ones, at once and while ranks work on."""

import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from jobs.cli.training_steps import TIME_LIMITS_S
from tests.training.distributed.rank_processes import NUM_RANKS, World
from tests.training.trainers.ranks import RankPool, impatient
from training.distributed import collectives, process_group
from training.distributed.collectives import (
    Traffic,
    all_to_all,
    count_sent,
    gather_host_names,
    gather_ragged,
    gather_text,
    run_own_tasks,
    start_receive,
    start_send,
    start_sum,
)
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks


def reduce(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    total, mean = torch.full((3,), group.rank() + 1.0), torch.full((3,), group.rank() + 1.0)
    collectives.all_reduce_sum(total, group)
    collectives.all_reduce_mean(mean, group)
    return total, mean


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_and_averages(rank_pool: RankPool, num_ranks: int) -> None:
    """The sum of 1 .. N is N (N + 1) / 2 and the mean (N + 1) / 2, on every rank."""
    for total, mean in rank_pool.run(num_ranks, reduce):
        assert total.tolist() == [num_ranks * (num_ranks + 1) / 2] * 3
        assert mean.tolist() == [(num_ranks + 1) / 2] * 3


LENGTHS = [1, 1, 40, 50, 9, 9, 70_000, 3, 0, 2]


def gather_steps(group: ProcessGroup, lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return each rank's value and count at every step, where rank 1 has `lengths`."""
    steps = []
    for length in lengths:
        mine = torch.full((group.rank() * length,), group.rank(), dtype=torch.int32)
        gathered = gather_ragged(mine, group, "test")
        assert all(len(values.unique()) <= 1 for values in gathered)
        steps.append([(int(values[:1].sum()), len(values)) for values in gathered])
    return steps


def expected_of(num_ranks: int, lengths: Sequence[int]) -> list[list[list[tuple[int, int]]]]:
    steps = [
        [(rank if length else 0, rank * length) for rank in range(num_ranks)] for length in lengths
    ]
    return [steps] * num_ranks


def name_hosts(group: ProcessGroup) -> list[str]:
    return gather_host_names(group, torch.device("cpu"))


def gather_for_different_purposes(group: ProcessGroup) -> None:
    gather_text("!", group, f"purpose {group.rank()}", torch.device("cpu"))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gathers_ragged_values(rank_pool: RankPool, num_ranks: int) -> None:
    """Ranks may give different numbers of values, or none; all receive all, in rank order.

    This holds whether the values travel eagerly or not, for real and for simulated ranks.
    """
    expected = expected_of(num_ranks, LENGTHS)
    assert rank_pool.run(num_ranks, gather_steps, LENGTHS) == expected
    assert simulate_ranks(num_ranks, gather_steps, LENGTHS) == expected


def test_gathers_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of several hosts first send only their numbers of values."""
    names = cycle("ab")
    monkeypatch.setattr(platform, "node", lambda: next(names))
    assert simulate_ranks(4, gather_steps, LENGTHS) == expected_of(4, LENGTHS)


def test_every_rank_knows_all_hosts(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks receive the host names of all; names beyond 256 bytes are cut."""
    assert rank_pool.run(2, name_hosts) == [[platform.node()] * 2] * 2
    monkeypatch.setattr(platform, "node", lambda: 300 * "\N{GREEK SMALL LETTER ALPHA}")
    assert simulate_ranks(2, name_hosts) == [[128 * "\N{GREEK SMALL LETTER ALPHA}"] * 2] * 2


def test_gathers_for_different_purposes_fail(rank_pool: RankPool) -> None:
    """If ranks gather for different purposes, the gather fails on all of them at once."""
    for message in rank_pool.errors(4, gather_for_different_purposes):
        assert "are at another point of training. Check" in message


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


SCENARIOS: dict[str, tuple[Callable[[ProcessGroup], Any], list[Any] | None]] = {
    "ring": (exchange_on_a_ring, [[[rank] * 3, [10 + rank] * 3] for rank in (3, 0, 1, 2)]),
    "parts": (
        exchange_parts,
        [
            [torch.full((rank,), other + rank / 10).tolist() for other in range(4)]
            for rank in range(4)
        ],
    ),
    "sums": (sums_started_together, None),
    # 48 each of the sum and the send, 36 of the all-to-all; 48 of the broadcast's root.
    "bytes": (count_bytes, [48 + 48 + 36 + 48, *[48 + 48 + 36] * 3]),
    "looks": (look_before_and_after, [(False, True)] * 2),
}
"""Exchanges, and what each of four ranks, or of two that look, has then."""


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_simulated_exchanges_equal_real_ones(rank_pool: RankPool, name: str) -> None:
    """Every kind of exchange gives simulated ranks what it gives real ones, bit for bit.

    The n-th receive of a tag has the n-th message that its sender has sent.
    """
    scenario, expected = SCENARIOS[name]
    num_ranks = 4 if expected is None else len(expected)
    simulated, real = simulate_ranks(num_ranks, scenario), rank_pool.run(num_ranks, scenario)
    for rank, (one, other) in enumerate(zip(simulated, real, strict=True)):
        found = one.tolist() if isinstance(one, Tensor) else one
        assert found == (other.tolist() if isinstance(other, Tensor) else other)
        assert expected is None or found == expected[rank]


def sum_in_vain(group: ProcessGroup) -> None:
    group = impatient()
    if group.rank() == 0:
        collectives.all_reduce_sum(torch.ones(3), group)


def receive_in_vain(group: ProcessGroup) -> None:
    group = impatient()
    if group.rank() == 0:
        start_receive(torch.empty(2), 1, group, TAG).wait()
    time.sleep(3)


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (sum_in_vain, r"sum failed on rank 0 of 2(.|\n)*same number of steps"),
        (receive_in_vain, "receive from rank 1 failed on rank 0 of 2"),
    ],
)
def test_waits_no_longer_than_the_limit(
    rank_pool: RankPool, wait: Callable[[ProcessGroup], None], message: str
) -> None:
    """A rank that waits for a missing one fails within its group's limit; the message helps."""
    began = time.monotonic()
    assert re.search(message, rank_pool.errors(2, wait)[0])
    assert time.monotonic() - began < 5


def test_refuses_parts_of_another_length() -> None:
    """A rank that expects other lengths than ranks send gets an error that names both."""
    with pytest.raises(process_group.CollectiveError, match=r"\[1, 1\] values .* expects \[2, 2\]"):
        simulate_ranks(2, expect_more)


def expect_more(group: ProcessGroup) -> None:
    all_to_all([torch.zeros(1)] * 2, [2, 2], group, "x")


NUM_THREADS, NUM_MESSAGES = 4, 2_000


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


TIME_LIMIT_S = 2.0
PATIENCE_S = 60
SLOW_RANK = 1


def one_slow_rank(group: ProcessGroup, report_begin: Callable[[], None], seconds: int = 3) -> None:
    """Five tasks on four ranks; the second works for longer than an exchange may take."""
    done = []

    def work(task: int) -> int:
        if task == SLOW_RANK:
            time.sleep(seconds)
        done.append(task)
        return task

    report_begin()
    seen: list[int] = []
    run_own_tasks(range(5), work, seen.append, group, description="tasks")
    assert done == list(range(5))[group.rank() :: NUM_RANKS]
    assert seen[-1] == sum(range(5))


def test_a_task_may_take_longer_than_an_exchange() -> None:
    """The group's limit is 2 s, a task takes 3: every rank ends well.

    All know the losses of all.
    """
    world = World(one_slow_rank, TIME_LIMIT_S)
    try:
        world.wait_for_training()
        ends = world.ends(range(NUM_RANKS), PATIENCE_S)
        assert [end.exit_code for end in ends] == [0] * NUM_RANKS, ends
    finally:
        world.close()


def test_ranks_that_wait_for_a_killed_one_end() -> None:
    """It is killed within its task; the others end at once, and name it."""
    world = World(partial(one_slow_rank, seconds=PATIENCE_S), PATIENCE_S)
    try:
        world.wait_for_training()
        world.send_signal(SLOW_RANK, signal.SIGKILL)
        for end in world.ends([rank for rank in range(NUM_RANKS) if rank != SLOW_RANK], 30.0):
            assert end.exit_code == 1, end
            assert f"process {world.processes[SLOW_RANK].pid}) did not answer" in end.message, end
    finally:
        world.close()


def test_ranks_meet_within_the_least_time_limit() -> None:
    """Twice within it at least, and not so often that waiting takes a core."""
    assert 0.05 <= collectives.SLICE_S <= TIME_LIMITS_S.least / 2


def test_a_tasks_error_is_its_ranks() -> None:
    """It is raised in the rank's own thread, and ends all."""

    def fail(task: int) -> int:
        raise OSError(f"task {task} has no disk")

    with pytest.raises(OSError, match="task 0 has no disk"):
        simulate_ranks(1, partial(run_own_tasks, range(3), fail, print, description="tasks"))
