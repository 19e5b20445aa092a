"""Compare BMUF's block momentum across ranks with torch.optim on the negative block gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Bmuf, Htm

NUM_ELEMENTS = 5
MAX_SAMPLES = 6


def samples(step: int, rank: int, seed: int) -> Tensor:
    """Return a minibatch of integers; ranks have different numbers of samples, some none."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + rank)
    num_samples = int(torch.randint(MAX_SAMPLES, (1,), generator=generator))
    return torch.randint(-9, 10, (num_samples, NUM_ELEMENTS), generator=generator).double()


def train(
    group: ProcessGroup, num_blocks: int, settings: dict[str, Any], seed: int
) -> tuple[list[Tensor], Tensor]:
    """Return the models that blocks start from, and the final one; gradients are sums of samples.

    With learning rate 1 a rank's update does not depend on its model.
    """
    model = nn.Linear(NUM_ELEMENTS, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    starts = [model.weight.detach().clone().flatten()]
    with Bmuf(model, optimizer, group=group, **settings):
        for step in range(num_blocks * settings["block_size"]):
            optimizer.zero_grad()
            minibatch = samples(step, group.rank(), seed)
            if len(minibatch):
                model(minibatch).sum().backward()
            optimizer.step()
            if (step + 1) % settings["block_size"] == 0:
                starts.append(model.weight.detach().clone().flatten())
    return starts, model.weight.detach().flatten()


def block_gradient(block: int, num_ranks: int, block_size: int, seed: int) -> Tensor:
    """Return a block's change of the mean model: ranks count equally, whatever their samples."""
    steps = range(block * block_size, (block + 1) * block_size)
    sums = [samples(step, rank, seed).sum(0) for step in steps for rank in range(num_ranks)]
    return -torch.stack(sums).sum(0) / num_ranks


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([0.25, 0.75, 0.9]),
    st.sampled_from([1.0, 0.6]),
    st.sampled_from(["nesterov", "as_printed"]),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=10)
def test_blocks_are_torch_momentum(
    num_ranks: int, block_size: int, eta: float, zeta: float, form: str, seed: int
) -> None:
    """Broadcast models are SGD on -G: Nesterov's, or as printed classical with (1 + eta) zeta."""
    filter_settings = {"block_momentum": eta, "block_learning_rate": zeta, "form": form}
    simulated = simulate_ranks(
        num_ranks, train, 4, {"block_size": block_size, **filter_settings}, seed
    )
    expected = nn.Parameter(torch.zeros(NUM_ELEMENTS, dtype=torch.float64))
    oracle = (
        torch.optim.SGD([expected], lr=zeta, momentum=eta, nesterov=True)
        if form == "nesterov"
        else torch.optim.SGD([expected], lr=(1 + eta) * zeta, momentum=eta)
    )
    for block in range(4):
        expected.grad = -block_gradient(block, num_ranks, block_size, seed)
        oracle.step()
        for starts, _ in simulated:
            assert torch.allclose(starts[block + 1], expected.detach(), 1e-11, 1e-11)
    # torch's buffer is -Delta / zeta; W_g is the broadcast model less eta Delta.
    eta_delta = -eta * zeta * oracle.state[expected]["momentum_buffer"]
    final = expected.detach() - (eta_delta if form == "nesterov" else 0)
    for _, left in simulated:
        assert torch.allclose(left, final, 1e-11, 1e-11)


def train_on_equal_sums(group: ProcessGroup, counts: tuple[int, ...]) -> Tensor:
    """Train each rank on minibatches of the same sum, in `counts` samples.

    Counts are powers of two, so that 8 / n summed n times is exactly 8.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64)
    num_samples = counts[group.rank()]
    with Bmuf(model, optimizer, group=group, block_size=2):
        for _ in range(8):
            optimizer.zero_grad()
            minibatch = torch.full((num_samples, 1), 8 * (group.rank() + 1) / num_samples)
            model(minibatch).sum().backward()
            optimizer.step()
    return model.weight.detach()


def test_sample_counts_do_not_matter() -> None:
    """Equal gradients from 1 or 8 samples, equally many on all ranks or not, give equal bits."""
    runs = [
        simulate_ranks(4, train_on_equal_sums, counts)
        for counts in ((1, 1, 1, 1), (8, 8, 8, 8), (1, 2, 4, 8), (8, 1, 1, 1))
    ]
    assert len({float(weight) for run in runs for weight in run}) == 1


def move_apart(group: ProcessGroup, group_size: int, form: str) -> tuple[Tensor, Tensor]:
    """Move rank r's model from 0 to -r - 1 in a block; return the broadcast and the final model."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Htm(
        model,
        optimizer,
        group=group,
        group_size=group_size,
        block_size=1,
        gradient_threshold=0.0,
        block_learning_rate=0.5,
        block_momentum=0.5,
        form=form,
    )
    with trainer:
        model.weight.grad = torch.full_like(model.weight, group.rank() + 1.0)
        optimizer.step()
        broadcast = model.weight.detach().clone()
    return broadcast, model.weight.detach()


@pytest.mark.parametrize(("group_size", "mean"), [(1, -2.5), (2, -5.0)])
@pytest.mark.parametrize("form", ["nesterov", "as_printed"])
def test_a_block_moves_towards_the_mean(group_size: int, mean: float, form: str) -> None:
    """G has the models' sign: W_g = zeta mean, and the broadcast model is (1 + eta) W_g."""
    for broadcast, left in simulate_ranks(4, move_apart, group_size, form):
        assert torch.all(broadcast == 0.75 * mean)
        assert torch.all(left == (0.5 if form == "nesterov" else 0.75) * mean)
