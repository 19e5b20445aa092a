"""Check for mistakes that other projects shipped: unexchanged elements, starved gradients.

The default process group is in tests/training/trainers/test_explicit_groups.py, on real ranks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Bmuf, Gtc, Htm, Synchronous, Trainer

NUM_RANKS = 4
TAU = 2.0
NAMES = ("first", "second", "third")
# Each trainer, and the distance that every element moves if the ranks above 0 have gradient TAU.
TRAINERS: dict[str, tuple[Callable[..., Trainer], float]] = {
    "synchronous": (Synchronous, 3 * TAU),
    "gtc": (partial(Gtc, gradient_threshold=TAU), 3 * TAU),
    "bmuf": (partial(Bmuf, block_size=1, block_momentum=0.0), 3 / 4 * TAU),
    "htm": (
        partial(Htm, group_size=2, block_size=1, block_momentum=0.0, gradient_threshold=TAU),
        (1 + 2) / 2 * TAU,
    ),
}


def make_model(shapes: Sequence[tuple[int, ...]]) -> nn.Module:
    """Make tensors of these shapes, one that is not contiguous, and one that is not trained."""
    tensors = [torch.zeros(shape) for shape in shapes]
    model = nn.ParameterList([*tensors, torch.zeros(3, 5).t(), torch.zeros(4)])
    model[-1].requires_grad = False
    return model


def take_a_step(
    group: ProcessGroup, make_trainer: Callable[..., Trainer], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Take a step with gradients only on ranks above 0: unexchanged elements of rank 0 stay 0."""
    model = make_model(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with make_trainer(model, optimizer, group=group):
        if group.rank() > 0:
            for parameter in list(model)[:-1]:
                parameter.grad = torch.full_like(parameter, TAU)
        optimizer.step()
    return [parameter.detach() for parameter in model]


shapes = st.lists(st.lists(st.sampled_from([0, 1, 2, 31, 33, 257]), max_size=2), max_size=6)


@pytest.mark.parametrize("name", TRAINERS)
@given(shapes)
@example([[1], [], [0], [33_000, 3], [1]])
@settings(deadline=None, max_examples=6)
def test_every_trained_element_is_exchanged(name: str, shapes: list[list[int]]) -> None:
    """All elements of scalars, empty and large tensors are exchanged, in any order of them."""
    make_trainer, moved = TRAINERS[name]
    for replica in simulate_ranks(NUM_RANKS, take_a_step, make_trainer, shapes):
        *trained, frozen = replica
        assert all(torch.all(tensor == -moved) for tensor in trained)
        assert torch.all(frozen == 0)


def resume(group: ProcessGroup, make_trainer: Callable[..., Trainer]) -> tuple[list[Tensor], ...]:
    """Train named tensors, then resume in a model with another order of names, and in itself."""
    # torch would sort the names of a plain dictionary.
    whole, other = (
        nn.ParameterDict(OrderedDict((name, torch.zeros(4)) for name in order))
        for order in (NAMES, NAMES[::-1])
    )
    optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
    trainer = make_trainer(whole, optimizer, group=group)
    with trainer:
        take_steps(whole, optimizer, range(4), group.rank())
        state, weights = trainer.state_dict(), whole.state_dict()
        other.load_state_dict(weights)
        take_steps(whole, optimizer, range(4, 8), group.rank())
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    trainer = make_trainer(other, optimizer, group=group)
    trainer.load_state_dict(state)
    with trainer:
        take_steps(other, optimizer, range(4, 8), group.rank())
    return [whole[name].detach() for name in NAMES], [other[name].detach() for name in NAMES]


def take_steps(
    model: nn.ParameterDict, optimizer: torch.optim.Optimizer, steps: range, rank: int
) -> None:
    for step in steps:
        for seed, name in enumerate(NAMES):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + seed)
            gradient = torch.randint(-3, 4, model[name].shape, generator=generator)
            model[name].grad = gradient.float()
        optimizer.step()


@pytest.mark.parametrize("name", ["gtc", "bmuf", "htm"])
def test_state_belongs_to_parameters(name: str) -> None:
    """Residuals and block momentum belong to a parameter's name, not to its place in a vector."""
    settings = {"gtc": {}, "bmuf": {"block_momentum": 0.75}, "htm": {"block_momentum": 0.5}}[name]
    make_trainer = partial(TRAINERS[name][0], **settings)
    for whole, resumed in simulate_ranks(NUM_RANKS, resume, make_trainer):
        assert all(torch.equal(*pair) for pair in zip(whole, resumed, strict=True))
        assert not torch.equal(whole[0], whole[2])
