"""Simulated ranks have the bits of real ones, and take the virtual time that they are said to."""

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import (
    MIXING,
    TRAINERS,
    RankPool,
    all_equal,
    sgd,
    small_model,
    take_step,
    weights,
)
from training.distributed import collectives, process_group
from training.distributed.collectives import (
    CommunicationThread,
    start_receive,
    start_send,
    start_sum,
)
from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.trainers import Synchronous

NAMES = (
    *("synchronous", "gtc", "bmuf", "bmuf as printed", "bmuf top-k", "sparse_loco", "htm"),
    *MIXING,
)


def train(group: ProcessGroup, name: str) -> Tensor:
    """Take seven steps with dropout, so that each rank's random numbers matter too."""
    trainer_class, settings = TRAINERS[name]
    torch.manual_seed(group.rank())
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), small_model())
    torch.manual_seed(group.rank())
    optimizer = sgd(model)
    with trainer_class(model, optimizer, group=group, **settings):
        for step in range(7):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


def add_numbers(group: ProcessGroup, num_values: int) -> Tensor:
    """Return a sum whose bits depend on the order of its terms."""
    generator = torch.Generator().manual_seed(group.rank())
    values = torch.randn(num_values, generator=generator)
    collectives.all_reduce_sum(values, group)
    return values


def step_rank_times(group: ProcessGroup) -> None:
    model = small_model()
    optimizer = sgd(model)
    with Synchronous(model, optimizer, group=group):
        for step in range(group.rank() + 1):
            take_step(model, optimizer, step, 0)


def arrive_alone(group: ProcessGroup) -> None:
    if group.rank() == 0:
        collectives.barrier(group)


def fail_on_rank_1(group: ProcessGroup) -> None:
    if group.rank() == 1:
        raise ZeroDivisionError("mine")
    collectives.barrier(group)


@pytest.mark.parametrize("name", NAMES)
def test_equals_gloo_bitwise(rank_pool: RankPool, name: str) -> None:
    """Every trainer ends with the same model, bit for bit, in one process and in many."""
    simulated = simulate_ranks(4, train, name)
    assert all_equal([*simulated, *rank_pool.run(4, train, name)])


@pytest.mark.chaos
@pytest.mark.parametrize("name", NAMES)
def test_eight_ranks_equal_gloo_bitwise(eight_ranks: RankPool, name: str) -> None:
    """Where HTM has four groups, and gloo's ring more turns."""
    simulated = simulate_ranks(8, train, name)
    assert all_equal([*simulated, *eight_ranks.run(8, train, name)])


@pytest.mark.parametrize("num_values", [0, 1, 3, 1001, 4096, 700_001])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_as_gloo_does(rank_pool: RankPool, num_ranks: int, num_values: int) -> None:
    """Sums add their terms in the order of gloo's ring, for any number of values."""
    simulated = simulate_ranks(num_ranks, add_numbers, num_values)
    assert all_equal([*simulated, *rank_pool.run(num_ranks, add_numbers, num_values)])


def test_each_rank_has_its_own_random_numbers() -> None:
    """A rank draws the numbers that it would draw alone, and the caller's state is unchanged."""
    before = torch.get_rng_state()
    drawn = simulate_ranks(3, draw)
    assert torch.equal(torch.get_rng_state(), before)
    for rank, numbers in enumerate(drawn):
        torch.manual_seed(rank)
        assert torch.equal(numbers, torch.rand(4))
    torch.set_rng_state(before)


def draw(group: ProcessGroup) -> Tensor:
    torch.manual_seed(group.rank())
    first = torch.rand(2)
    collectives.barrier(group)
    return torch.cat([first, torch.rand(2)])


def test_a_deadlock_is_an_error() -> None:
    """Ranks that wait in vain fail at once, and the error names each rank and its exchange."""
    with pytest.raises(process_group.CollectiveError, match=r"rank 0 in an all-gather of 1 values"):
        simulate_ranks(2, arrive_alone)


def test_uneven_steps_are_an_error() -> None:
    """If a rank takes one step more than the others, the error names both of their exchanges."""
    exchange = r"(a sum|an all-to-all) of \d+ values"
    with pytest.raises(process_group.CollectiveError, match=f"are in {exchange}, . in {exchange}"):
        simulate_ranks(2, step_rank_times)


def test_an_error_ends_all_ranks() -> None:
    """The error of the rank that failed is raised, not those of the ranks that waited for it."""
    with pytest.raises(ZeroDivisionError, match="mine"):
        simulate_ranks(3, fail_on_rank_1)


LINK = SimulatedLink(latency_s=1.0, bytes_per_s=8.0)
"""A message of n floats takes 1 + n / 2 seconds."""


def meet(group: SimulatedGroup, works: list[float]) -> float:
    group.advance(works[group.rank()])
    collectives.all_reduce_sum(torch.zeros(8), group)
    return group.now()


@given(st.lists(st.floats(0, 100), min_size=2, max_size=4))
def test_a_sum_ends_after_its_last_rank(works: list[float]) -> None:
    """All ranks leave a sum at the last one's arrival, and 2 (L - 1) messages of an L-th later."""
    num_ranks = len(works)
    messages = 2 * (num_ranks - 1) * (1 + 32 / num_ranks / 8)
    ends = simulate_ranks(num_ranks, meet, works, link=LINK)
    assert ends == pytest.approx([max(works) + messages] * num_ranks)


def overlap(group: SimulatedGroup, work: float) -> float:
    pending = start_sum(torch.zeros(8), group, "x")
    group.advance(work)
    pending.wait()
    return group.now()


@pytest.mark.parametrize(("work", "end"), [(0.0, 6.0), (4.0, 6.0), (6.5, 6.5)])
def test_work_hides_an_exchange(work: float, end: float) -> None:
    """Work beside a sum of 6 s is free up to 6 s; from there on the sum is."""
    assert simulate_ranks(2, overlap, work, link=LINK) == [end, end]


def send_late(group: SimulatedGroup) -> tuple[bool, bool, float]:
    """Rank 0 looks for rank 1's message of 2 s, which leaves at 3, at 4 and at 6."""
    if group.rank() == 1:
        group.advance(3)
        start_send(torch.ones(2), 0, group, 0).wait()
        return False, False, group.now()
    receive = start_receive(torch.empty(2), 1, group, 0)
    group.advance(4)
    early = receive.is_done()
    group.advance(2)
    return early, receive.is_done(), group.now()


def test_a_message_arrives_in_its_time() -> None:
    """A message that leaves at 3 s and takes 2 is not there at 4 s, and is at 6.

    Its sender is free after the second that its bytes take.
    """
    assert simulate_ranks(2, send_late, link=LINK) == [(False, True, 6.0), (False, False, 4.0)]


POLL_S = 0.25


def race(group: SimulatedGroup, seconds: list[float]) -> list[tuple[float, float]]:
    """Ranks send the time after each step; rank 0 polls, and notes it with its own time."""
    if group.rank() > 0:
        for _ in range(5):
            group.advance(seconds[group.rank() - 1])
            start_send(torch.tensor([group.now()]), 0, group, 0).wait()
        return []
    seen = []
    receives = {rank: start_receive(torch.empty(1), rank, group, 0) for rank in (1, 2)}
    while len(seen) < 10:
        group.advance(POLL_S)
        for rank in [rank for rank, receive in receives.items() if receive.is_done()]:
            seen.append((float(receives[rank].wait()), group.now()))
            receives[rank] = start_receive(torch.empty(1), rank, group, 0)
    return seen


@given(st.lists(st.sampled_from([0.5, 1.0, 1.75, 3.0]), min_size=2, max_size=2))
def test_ranks_see_what_has_happened_before(seconds: list[float]) -> None:
    """A rank that polls sees each message at the first poll from its time on, no rank's earlier."""
    seen = simulate_ranks(3, race, seconds)[0]
    assert all(sent <= polled <= sent + POLL_S for sent, polled in seen)
    assert seen == simulate_ranks(3, race, seconds)[0]


def serve_beside(group: SimulatedGroup) -> tuple[float, float]:
    """Rank 1 answers in a thread while it works for 100 s; rank 0 asks at 5 s."""
    answered = []

    def answer() -> None:
        start_receive(torch.empty(2), 0, group, 0).wait()
        answered.append(group.now())
        start_send(torch.ones(2), 0, group, 1).wait()

    if group.rank() == 1:
        thread = CommunicationThread(answer, group, "answers")
        group.advance(100)
        thread.join()
        return answered[0], group.now()
    group.advance(5)
    start_send(torch.zeros(2), 1, group, 0).wait()
    start_receive(torch.empty(2), 1, group, 1).wait()
    return 0.0, group.now()


def test_a_thread_answers_while_its_rank_works() -> None:
    """A question that arrives at 7 s is answered at 9 s, by a rank at work until 100 s."""
    assert simulate_ranks(2, serve_beside, link=LINK) == [(0.0, 9.0), (7.0, 100.0)]


def fail_beside(group: ProcessGroup) -> None:
    def fail() -> None:
        raise ZeroDivisionError("beside")

    thread = CommunicationThread(fail, group, "failure")
    collectives.barrier(group)
    thread.check()


def test_an_error_of_a_thread_reaches_its_rank() -> None:
    """An error beside the training thread is raised there, when it looks."""
    with pytest.raises(ZeroDivisionError, match="beside"):
        simulate_ranks(2, fail_beside)


def leave_a_thread(group: ProcessGroup) -> float:
    def wait() -> None:
        start_receive(torch.empty(1), 1 - group.rank(), group, 0).wait()

    CommunicationThread(wait, group, "in vain")
    return cast(SimulatedGroup, group).now()


def test_a_thread_in_vain_ends_with_the_ranks() -> None:
    """A thread that waits for a message which never comes does not outlive the ranks."""
    assert simulate_ranks(2, leave_a_thread) == [0.0, 0.0]


def test_refuses_links_and_work_that_cannot_be() -> None:
    """A negative latency or work and a rate of 0 are refused, with their values."""
    with pytest.raises(ValueError, match="latency_s = -1"):
        SimulatedLink(latency_s=-1)
    with pytest.raises(ValueError, match="bytes_per_s = 0"):
        SimulatedLink(bytes_per_s=0)
    with pytest.raises(ValueError, match="-2 seconds of work: need at least 0"):
        simulate_ranks(1, lambda group: group.advance(-2))
