"""Compare blockwise model-update filtering with torch's own momentum."""

import pytest
import torch
from torch import Tensor

from training.algorithms.block_filter import BlockFilter
from training.settings.trainers import BmufConfig


def broadcast_models(block_filter: BlockFilter, num_blocks: int) -> tuple[list[Tensor], Tensor]:
    """Return the broadcast models and the last W_g; each block moves the mean by a known G."""
    state = block_filter.begin(torch.zeros(4, dtype=torch.float64))
    models = [state.broadcast_model]
    for block in range(num_blocks):
        state = block_filter.end_block(state, state.broadcast_model + block_gradient(block))
        models.append(state.broadcast_model)
    return models, state.global_model


def block_gradient(block: int) -> Tensor:
    generator = torch.Generator().manual_seed(block)
    return torch.randn(4, dtype=torch.float64, generator=generator)


def sgd_models(num_blocks: int, **settings: float | bool) -> list[Tensor]:
    """Return the models of torch.optim.SGD on -G."""
    model = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([model], **settings)  # type: ignore[arg-type]
    models = [model.detach().clone()]
    for block in range(num_blocks):
        model.grad = -block_gradient(block)
        optimizer.step()
        models.append(model.detach().clone())
    return models


@pytest.mark.parametrize(("zeta", "eta"), [(1.0, 0.75), (0.5, 0.9), (1.0, 0.0)])
def test_nesterov_is_torch_nesterov(zeta: float, eta: float) -> None:
    """The broadcast model is SGD(lr=zeta, momentum=eta, nesterov) on -G."""
    models, _ = broadcast_models(BlockFilter(zeta, eta, "nesterov"), 12)
    expected = sgd_models(12, lr=zeta, momentum=eta, nesterov=eta > 0)
    torch.testing.assert_close(models, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("zeta", "eta"), [(1.0, 0.75), (0.5, 0.9)])
def test_as_printed_is_classical_momentum(zeta: float, eta: float) -> None:
    """Eq. (4) to the letter is SGD(lr=(1 + eta) zeta, momentum=eta) on -G, not Nesterov."""
    models, global_model = broadcast_models(BlockFilter(zeta, eta, "as_printed"), 12)
    expected = sgd_models(12, lr=(1 + eta) * zeta, momentum=eta)
    torch.testing.assert_close(models, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(global_model, models[-1])


def test_without_momentum_it_is_model_averaging() -> None:
    """With eta = 0 and zeta = 1 the filter gives the mean bitwise, unlike W + (mean - W)."""
    model, mean = torch.tensor([1e8]), torch.tensor([0.1])
    block_filter = BlockFilter(1.0, 0.0, "nesterov")
    assert torch.equal(block_filter.end_block(block_filter.begin(model), mean).global_model, mean)
    assert not torch.equal(model + (mean - model), mean)


def test_a_resumed_filter_starts_from_the_same_model() -> None:
    """The global model and the last update give the next block's start, bitwise."""
    for form in ("nesterov", "as_printed"):
        block_filter = BlockFilter(0.7, 0.6, form)
        state = block_filter.end_block(block_filter.begin(torch.ones(3)), torch.rand(3))
        again = block_filter.begin(state.global_model, state.update)
        assert torch.equal(again.broadcast_model, state.broadcast_model)


@pytest.mark.parametrize(
    ("num_models", "zeta", "constant", "eta"),
    [(4, 1.0, 1.0, 0.75), (16, 1.0, 1.0, 0.9375), (1, 1.0, 1.0, 0.0), (4, 1.0, 2.0, 0.875)],
)
def test_block_momentum_solves_eq_5(
    num_models: int, zeta: float, constant: float, eta: float
) -> None:
    """eta solves zeta / (N (1 - eta)) = C."""
    config = BmufConfig(block_learning_rate=zeta, momentum_constant=constant)
    assert config.block_momentum_of(num_models) == eta
    assert zeta / (num_models * (1 - eta)) == constant


@pytest.mark.parametrize(("num_models", "zeta", "constant"), [(2, 1.0, 0.1), (4, 1.0, 0.2499)])
def test_refuses_a_momentum_constant_that_no_momentum_has(
    num_models: int, zeta: float, constant: float
) -> None:
    """A constant below zeta / N, for which eta would be negative, is refused."""
    bound = f"need at least block_learning_rate / N = {zeta} / {num_models}, or the block momentum"
    config = BmufConfig(block_learning_rate=zeta, momentum_constant=constant)
    with pytest.raises(ValueError, match=f"momentum_constant = {constant}: {bound}"):
        config.block_momentum_of(num_models)
