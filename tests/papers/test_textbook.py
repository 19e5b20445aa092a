"""Compare GTC, BMUF and HTM on simulated ranks with textbook loops in NumPy, at random settings."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.papers.textbook import Settings, Trajectory, train
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Bmuf, Gtc, Htm, Trainer

SIZES = (3, 1, 7)
NUM_ELEMENTS = sum(SIZES)
MAX_STEPS = 7

symbols = st.builds(
    Settings,
    group_size=st.integers(1, 4),
    block_size=st.integers(1, 4),
    tau=st.sampled_from([0.0, 2.0, 5.0]),
    eta=st.sampled_from([0.0, 0.5, 0.9]),
    zeta=st.sampled_from([1.0, 0.7]),
    form=st.sampled_from(["nesterov", "as_printed"]),
    learning_rate=st.sampled_from([1.0, 0.3]),
    momentum=st.sampled_from([0.0, 0.9]),
)


def draw(num_ranks: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a model, and integer gradients that are below every threshold in some steps only."""
    generator = np.random.default_rng(seed)
    largest = generator.integers(0, 10, (MAX_STEPS, 1, 1))
    shape = (MAX_STEPS, num_ranks, NUM_ELEMENTS)
    return generator.normal(size=NUM_ELEMENTS), generator.integers(-largest, largest + 1, shape)


def run(
    group: ProcessGroup,
    make_trainer: Callable[..., Trainer],
    start: np.ndarray,
    gradients: np.ndarray,
    symbols: Settings,
) -> Trajectory:
    """Train one rank; only rank 0 has the model to start from, and zero gradients are missing."""
    values = torch.from_numpy(start) if group.rank() == 0 else torch.zeros(NUM_ELEMENTS).double()
    model = nn.ParameterList([nn.Parameter(piece.clone()) for piece in values.split(SIZES)])
    optimizer = torch.optim.SGD(
        model.parameters(), lr=symbols.learning_rate, momentum=symbols.momentum
    )
    models = []
    trainer = make_trainer(model, optimizer, group=group)
    with trainer:
        for step in torch.from_numpy(gradients[:, group.rank()]).double():
            optimizer.zero_grad()
            for parameter, piece in zip(model, step.split(SIZES), strict=True):
                parameter.grad = piece.clone() if piece.any() else None
            optimizer.step()
            models.append(weights(model))
        state = trainer.state_dict().get("residuals", {"": torch.zeros(0)})
    residual = torch.cat([piece.flatten() for piece in state.values()])
    return Trajectory(np.array(models), weights(model), residual.numpy())


def weights(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach() for p in model.parameters()]).numpy()


def check(simulated: list[Trajectory], expected: Trajectory) -> None:
    """Assert that residuals are exact, and models equal to the last bits of float64 on all ranks.

    Each of at most 7 steps adds a few roundings of 1e-16 to weights below 1e4.
    """
    for rank, trajectory in enumerate(simulated):
        np.testing.assert_allclose(trajectory.models, expected.models[:, rank], 1e-11, 1e-11)
        np.testing.assert_allclose(trajectory.final, expected.final, 1e-11, 1e-11)
        assert np.array_equal(trajectory.final, simulated[0].final)
        if len(trajectory.residuals):
            assert np.array_equal(trajectory.residuals, expected.residuals[rank])


def block_settings(symbols: Settings) -> dict[str, object]:
    return {
        "block_size": symbols.block_size,
        "block_momentum": symbols.eta,
        "block_learning_rate": symbols.zeta,
        "form": symbols.form,
    }


@given(symbols, st.integers(1, 4), st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_htm_is_the_textbook(symbols: Settings, num_groups: int, seed: int) -> None:
    """HTM's models after every step, residuals and final model equal the textbook's."""
    start, gradients = draw(num_groups * symbols.group_size, seed)
    htm = partial(
        Htm,
        group_size=symbols.group_size,
        gradient_threshold=symbols.tau,
        **block_settings(symbols),
    )
    simulated = simulate_ranks(gradients.shape[1], run, htm, start, gradients, symbols)
    check(simulated, train(start, gradients, symbols))


@given(symbols, st.integers(0, 2**32))
@settings(deadline=None, max_examples=8)
def test_gtc_is_the_textbook(symbols: Settings, seed: int) -> None:
    """GTC's models and residuals equal the textbook's for two or more ranks.

    The textbook's HTM does not quantize in a group of one rank.
    """
    symbols = Settings(**{**vars(symbols), "group_size": symbols.group_size + 1})
    start, gradients = draw(symbols.group_size, seed)
    gtc = partial(Gtc, gradient_threshold=symbols.tau)
    simulated = simulate_ranks(gradients.shape[1], run, gtc, start, gradients, symbols)
    check(simulated, train(start, gradients, symbols))


@given(symbols, st.integers(1, 6), st.integers(0, 2**32))
@settings(deadline=None, max_examples=8)
def test_bmuf_is_the_textbook(symbols: Settings, num_ranks: int, seed: int) -> None:
    """BMUF's models equal those of the textbook's HTM in groups of one rank."""
    symbols = Settings(**{**vars(symbols), "group_size": 1})
    start, gradients = draw(num_ranks, seed)
    bmuf = partial(Bmuf, **block_settings(symbols))
    simulated = simulate_ranks(num_ranks, run, bmuf, start, gradients, symbols)
    check(simulated, train(start, gradients, symbols))
