"""GTC, BMUF and HTM on simulated ranks against textbook loops in NumPy, over random settings."""

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
    """A model, and integer gradients, small on some steps and beyond every threshold on others."""
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
    """One rank's training; only rank 0 has the model to start from, zero gradients are missing."""
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
    """Residuals of integers are exact; models differ by the last bits of float64, and not by rank.

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
    """Every rank's model after every step, its residual, and the model that is left."""
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
    """Residual, message and sum, of any number of ranks but one, whose textbook quantizes not."""
    symbols = Settings(**{**vars(symbols), "group_size": symbols.group_size + 1})
    start, gradients = draw(symbols.group_size, seed)
    gtc = partial(Gtc, gradient_threshold=symbols.tau)
    simulated = simulate_ranks(gradients.shape[1], run, gtc, start, gradients, symbols)
    check(simulated, train(start, gradients, symbols))


@given(symbols, st.integers(1, 6), st.integers(0, 2**32))
@settings(deadline=None, max_examples=8)
def test_bmuf_is_the_textbook(symbols: Settings, num_ranks: int, seed: int) -> None:
    """Groups of one rank, where nothing is quantized."""
    symbols = Settings(**{**vars(symbols), "group_size": 1})
    start, gradients = draw(num_ranks, seed)
    bmuf = partial(Bmuf, **block_settings(symbols))
    simulated = simulate_ranks(num_ranks, run, bmuf, start, gradients, symbols)
    check(simulated, train(start, gradients, symbols))


def test_nothing_is_lost_on_64_ranks() -> None:
    """Applied + all residuals = all gradients, exactly, on as many ranks as the papers have."""
    symbols = Settings(64, 1, 8.0, 0.0, 1.0, "nesterov", 1.0, 0.0)
    _, gradients = draw(64, 0)
    start = np.zeros(NUM_ELEMENTS)
    gtc = partial(Gtc, gradient_threshold=symbols.tau)
    simulated = simulate_ranks(64, run, gtc, start, gradients, symbols)
    residuals = sum(rank.residuals for rank in simulated)
    for rank in simulated:
        assert np.array_equal(residuals - rank.final, gradients.sum((0, 1)))
    assert np.any(simulated[0].final != 0)
    assert np.any(residuals != 0)
