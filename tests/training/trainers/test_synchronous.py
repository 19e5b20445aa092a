"""Synchronous SGD against one process on the concatenated minibatches."""

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Synchronous

OPTIMIZERS = {"sgd": sgd, "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01)}


def train(group: ProcessGroup, optimizer_name: str) -> Tensor:
    model = small_model(seed=group.rank())
    optimizer = OPTIMIZERS[optimizer_name](model)
    with Synchronous(model, optimizer, group=group):
        for step in range(5):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


def train_without_data(group: ProcessGroup) -> Tensor:
    """Rank 1 has data for two steps only; then its gradients are missing."""
    model = small_model()
    optimizer = sgd(model)
    with Synchronous(model, optimizer, group=group):
        for step in range(5):
            if group.rank() == 0 or step < 2:
                take_step(model, optimizer, step, group.rank())
            else:
                optimizer.zero_grad()
                optimizer.step()
    return weights(model)


@pytest.mark.parametrize("optimizer_name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_one_process(rank_pool: RankPool, num_ranks: int, optimizer_name: str) -> None:
    """N ranks are one process on the N minibatches together; replicas are bitwise equal."""
    replicas = rank_pool.run(num_ranks, train, optimizer_name)
    model = small_model()
    optimizer = OPTIMIZERS[optimizer_name](model)
    for step in range(5):
        take_step(model, optimizer, step, *range(num_ranks))
    assert all_equal(replicas)
    torch.testing.assert_close(replicas[0], weights(model), rtol=1e-4, atol=1e-6)
    if num_ranks == 1:
        assert torch.equal(replicas[0], weights(model))


def test_a_rank_may_run_out_of_data(rank_pool: RankPool) -> None:
    """Missing gradients count as zeros: the step is that of the ranks that have data."""
    replicas = rank_pool.run(2, train_without_data)
    model = small_model()
    optimizer = sgd(model)
    for step in range(5):
        take_step(model, optimizer, step, *((0, 1) if step < 2 else (0,)))
    assert all_equal(replicas)
    torch.testing.assert_close(replicas[0], weights(model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_rank_alone_is_stopped_by_what_is_not_finite(broken: float) -> None:
    """Before the optimizer applies it."""

    def scenario(group: ProcessGroup) -> None:
        model = small_model()
        optimizer = sgd(model)
        with Synchronous(model, optimizer, group=group):
            take_step(model, optimizer, 0, 0)
            model[0].bias.grad[3] = broken
            optimizer.step()

    with pytest.raises(
        FloatingPointError, match=r"gradient of rank 0 holds a NaN.*first at step 2"
    ):
        simulate_ranks(1, scenario)
