"""Simulated ranks that share a GPU: streams of their own, and events that order their exchanges."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.training.distributed.stream_races import StreamRaces, races
from tests.training.trainers.ranks import all_equal, sgd, small_model, take_step, weights
from training.distributed import collectives
from training.distributed.simulated_group import (
    SharedDevice,
    SharedGpu,
    SimulatedGroup,
    simulate_ranks,
)
from training.trainers import Bmuf, Gtc, Htm, SparseLoco, Synchronous

__all__ = ["races"]

NUM_STEPS = 3
TRAINERS = {
    "synchronous": (2, Synchronous),
    "gtc": (2, partial(Gtc, gradient_threshold=1 / 64)),
    "bmuf": (8, partial(Bmuf, block_size=2, optimizer_state="average")),
    "sparse_loco": (4, partial(SparseLoco, block_size=2)),
    "htm": (8, partial(Htm, group_size=2, block_size=2, gradient_threshold=1 / 64)),
}


@pytest.fixture
def gpu(races: StreamRaces) -> SharedGpu:
    """A CPU whose work is ordered, and watched, as a GPU's."""
    del races
    return SharedGpu(torch.device("cpu"))


def train(group: SimulatedGroup, name: str) -> Tensor:
    """Take steps with dropout, and pass the turn after each; leave within a block."""
    torch.manual_seed(group.rank())
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), small_model())
    torch.manual_seed(group.rank())
    optimizer = sgd(model)
    with TRAINERS[name][1](model, optimizer, group=group):
        for step in range(NUM_STEPS):
            take_step(model, optimizer, step, group.rank())
            group.pass_turn()
    return weights(model)


@pytest.mark.parametrize("name", TRAINERS)
def test_exchanges_wait_for_each_other(races: StreamRaces, gpu: SharedGpu, name: str) -> None:
    """No rank's stream touches another's memory but after events; the bits are those of a CPU."""
    num_ranks = TRAINERS[name][0]
    on_gpu = simulate_ranks(num_ranks, train, name, device=gpu)
    assert races.found == []
    assert races.num_streams == num_ranks
    assert races.num_operations > num_ranks * NUM_STEPS
    assert all_equal([*on_gpu, *simulate_ranks(num_ranks, train, name)])


def test_an_exchange_without_events_is_a_race(
    races: StreamRaces, gpu: SharedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams above are ordered by the events alone, as they are here without."""
    monkeypatch.setattr(SharedGpu, "wait_for", SharedDevice.wait_for)
    simulate_ranks(2, train, "bmuf", device=gpu)
    assert any("does not wait for stream" in race for race in races.found)
    assert any("may use the memory" in race for race in races.found)


def add_one(group: SimulatedGroup, shared: Tensor) -> Tensor:
    return shared + group.rank()


def test_the_caller_waits_and_is_waited_for(races: StreamRaces, gpu: SharedGpu) -> None:
    """Ranks begin after what the caller has queued, and it resumes after what they have queued."""
    with races.watching_caller():
        shared = torch.zeros(4)
        shared += 1
        first, second = simulate_ranks(2, add_one, shared, device=gpu)
        total = first + second
    assert races.found == []
    assert total.tolist() == [3.0] * 4


def note_turns(group: SimulatedGroup, turns: list[int]) -> None:
    for _ in range(3):
        turns.append(group.rank())
        group.pass_turn()


def test_turns_pass_where_work_is_queued(gpu: SharedGpu) -> None:
    """On a GPU each rank queues a step, then the next rank; on a CPU a rank keeps its turn."""
    queued: list[int] = []
    done: list[int] = []
    simulate_ranks(3, note_turns, queued, device=gpu)
    simulate_ranks(3, note_turns, done)
    assert queued == [0, 1, 2] * 3
    assert done == [0] * 3 + [1] * 3 + [2] * 3


def draw(group: SimulatedGroup, generator: torch.Generator) -> Tensor:
    generator.manual_seed(group.rank())
    first = torch.rand(2, generator=generator)
    group.pass_turn()
    collectives.barrier(group)
    return torch.cat([first, torch.rand(2, generator=generator)])


def test_each_rank_has_its_own_random_numbers_of_the_device(
    races: StreamRaces, gpu: SharedGpu
) -> None:
    """A rank draws from the device's generator what it would draw alone; the caller's resumes."""
    before = races.generator.get_state()
    drawn = simulate_ranks(3, draw, races.generator, device=gpu)
    assert torch.equal(races.generator.get_state(), before)
    for rank, numbers in enumerate(drawn):
        assert torch.equal(numbers, torch.rand(4, generator=torch.Generator().manual_seed(rank)))
