"""Compare simulated ranks with real ones: their results are equal bit for bit."""

import pytest
import torch
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
from training.distributed.simulated_group import simulate_ranks
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
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_equals_gloo_bitwise(
    rank_pool: RankPool, eight_ranks: RankPool, num_ranks: int, name: str
) -> None:
    """Every trainer ends with the same model, bit for bit, in one process and in many."""
    simulated = simulate_ranks(num_ranks, train, name)
    pool = eight_ranks if num_ranks == 8 else rank_pool
    assert all_equal([*simulated, *pool.run(num_ranks, train, name)])


@pytest.mark.parametrize("num_values", [0, 1, 3, 1001, 4096, 700_001])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_sums_as_gloo_does(eight_ranks: RankPool, num_ranks: int, num_values: int) -> None:
    """Sums add their terms in the order of gloo's ring, for any number of values."""
    simulated = simulate_ranks(num_ranks, add_numbers, num_values)
    assert all_equal([*simulated, *eight_ranks.run(num_ranks, add_numbers, num_values)])


@pytest.mark.chaos
def test_128_ranks() -> None:
    """128 synchronous ranks, as in the papers' largest runs, equal one on all minibatches."""
    models = simulate_ranks(128, train_alike)
    model = small_model()
    optimizer = sgd(model)
    for step in range(2):
        take_step(model, optimizer, step, *range(128))
    assert all_equal(models)
    torch.testing.assert_close(models[0], weights(model))


def train_alike(group: ProcessGroup) -> Tensor:
    model = small_model()
    optimizer = sgd(model)
    with Synchronous(model, optimizer, group=group):
        for step in range(2):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


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
