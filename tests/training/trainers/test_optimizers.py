"""Optimizers and steps beyond the plain: fused, sparse, compiled, factored, not finite."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import (
    TRAINERS,
    RankPool,
    all_equal,
    minibatch,
    sgd,
    small_model,
    take_step,
    weights,
)
from training.distributed.checks import FiniteCheck
from training.distributed.simulated_group import simulate_ranks
from training.trainers import AdPsgd, Gtc, Trainer

ALL: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    **TRAINERS,
    "gtc unquantized": (Gtc, {"gradient_threshold": 0.0}),
    "ad_psgd": (AdPsgd, {"mixing_seed": 1}),
}


def make(group: ProcessGroup, name: str, model: nn.Module, optimizer: Any) -> Trainer:
    trainer_class, settings = ALL[name]
    return trainer_class(model, optimizer, group=group, **settings)


def train_scaled(
    group: ProcessGroup, name: str, fused: bool, unscale: bool, enabled: bool = True
) -> Tensor:
    """A loop with `GradScaler`, in the trainer's block and after it."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)

    def step(number: int) -> None:
        optimizer.zero_grad()
        inputs, targets = minibatch(number, group.rank())
        scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    try:
        with make(group, name, model, optimizer):
            for number in range(4):
                step(number)
    finally:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        before = weights(model)
        step(4)
        assert torch.any(weights(model) != before)
    return weights(model)


@pytest.mark.parametrize("name", ["synchronous", "bmuf", "rand_psgd", "one_bit", "ad_psgd"])
def test_a_gradient_scaler_is_refused(name: str) -> None:
    """At its first step on every rank, whether the scaler would skip it or not.

    Ranks would skip steps at different times. After leaving, the scaler is the optimizer's again.
    """
    for fused, unscale in ((False, True), (True, False)):
        with pytest.raises(ValueError, match=r"^GradScaler: each rank's.*use torch\.autocast"):
            simulate_ranks(4, train_scaled, name, fused, unscale)


def test_a_scaler_that_is_disabled_is_none() -> None:
    """It calls the step as a loop without it does."""
    simulate_ranks(2, train_scaled, "synchronous", False, False, False)


class Bag(nn.Module):
    """An embedding of many rows, of which a minibatch touches few."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 3, sparse=sparse)

    def forward(self, rows: Tensor) -> Tensor:
        return self.table(rows).square().sum()


def train_sparse(group: ProcessGroup, name: str, sparse: bool) -> Tensor:
    model = Bag(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with make(group, name, model, optimizer):
        for step in range(7):
            optimizer.zero_grad()
            if step != group.rank():  # a rank without data has no gradient at all
                rows = torch.arange(3) * 7 + step + group.rank()
                model(torch.cat([rows, rows])).backward()
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("name", ["synchronous", "gtc", "bmuf", "rand_psgd"])
def test_sparse_gradients_are_exchanged_as_dense_ones(name: str) -> None:
    """An embedding with `sparse=True` is trained bitwise as one with dense gradients."""
    sparse, dense = (simulate_ranks(4, train_sparse, name, sparse) for sparse in (True, False))
    assert all_equal([*sparse, *dense])


def test_sparse_adam_is_refused() -> None:
    """It takes no dense gradient; the message says what does."""

    def scenario(group: ProcessGroup) -> None:
        model = Bag(True)
        make(group, "bmuf", model, torch.optim.SparseAdam(model.parameters()))

    with pytest.raises(
        ValueError, match=r"SparseAdam takes sparse gradients alone.*use Adam or SGD"
    ):
        simulate_ranks(1, scenario)


def train_compiled(group: ProcessGroup, name: str, backend: str) -> Tensor:
    model = small_model()
    optimizer = sgd(model)
    step_once = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
    with make(group, name, model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = minibatch(step, group.rank())
            nn.functional.cross_entropy(model(inputs), targets).backward()
            step_once()
    return weights(model)


@pytest.mark.parametrize("name", ["synchronous", "bmuf"])
def test_a_compiled_step_exchanges(rank_pool: RankPool, name: str) -> None:
    """`torch.compile` around `optimizer.step` leaves the exchanges to Python, bit for bit."""
    compiled, plain = (rank_pool.run(2, train_compiled, name, each) for each in ("aot_eager", ""))
    assert all_equal([*compiled, *plain])


def train_with_a_nan(group: ProcessGroup, name: str, what: float, bad_step: int) -> str:
    """Rank 1's gradient holds a value in one element of one step."""
    model = small_model()
    optimizer = sgd(model)
    try:
        with make(group, name, model, optimizer):
            for step in range(7):
                optimizer.zero_grad()
                inputs, targets = minibatch(step, group.rank())
                nn.functional.cross_entropy(model(inputs), targets).backward()
                if group.rank() == 1 and step + 1 == bad_step:
                    model[0].weight.grad[0, 0] = what
                optimizer.step()
    except FloatingPointError as error:
        return f"after {step} steps: {error}"
    return "no error"


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "num_before"), [("synchronous", 1), ("gtc", 1), ("gtc unquantized", 1), ("bmuf", 2)]
)
def test_a_gradient_that_is_not_finite_ends_all_ranks(
    rank_pool: RankPool, name: str, num_before: int, what: float
) -> None:
    """At its step, or at the block's end: all ranks name the rank and the step where it was."""
    for message in rank_pool.run(2, train_with_a_nan, name, what, 2):
        assert message.startswith(f"after {num_before} steps: the gradient of rank 1 holds a NaN")
        assert "first at step 2" in message


def test_a_sum_that_overflows_is_said_so() -> None:
    """No rank is at fault, and the message names none."""

    def scenario(group: ProcessGroup) -> None:
        model = nn.Linear(2, 1)
        optimizer = sgd(model)
        with make(group, "synchronous", model, optimizer):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3e38)
            optimizer.step()

    with pytest.raises(FloatingPointError, match="exchanged at step 1 overflows, though each"):
        simulate_ranks(2, scenario)


@pytest.mark.parametrize("name", ["synchronous", "bmuf"])
@pytest.mark.parametrize("saves", [False, True])
def test_a_gpus_ranks_stop_one_step_later(
    monkeypatch: pytest.MonkeyPatch, name: str, saves: bool
) -> None:
    """A look that does not wait finds it at the next step, or before the state is taken.

    The same code, on a CPU whose results are looked at late.
    """
    made = FiniteCheck.__init__

    def make_late(self: FiniteCheck, group: ProcessGroup, device: torch.device) -> None:
        made(self, group, device)
        self._is_late = True

    monkeypatch.setattr(FiniteCheck, "__init__", make_late)

    def scenario(group: ProcessGroup) -> str:
        model = small_model()
        optimizer = sgd(model)
        taken = 0
        try:
            with make(group, name, model, optimizer) as trainer:
                for step in range(7):
                    take_step(model, optimizer, step, group.rank())
                    if step == 1 and group.rank() == 1:
                        with torch.no_grad():
                            model[0].weight[0, 0] = float("nan")
                    taken += 1
                    if saves and step >= 2:
                        trainer.state_dict()
        except FloatingPointError as error:
            return f"after {taken} steps: {error}"
        return "no error"

    # Rank 1's model is spoilt after step 2, so the gradient of step 3 is; a block ends with step 3.
    expected = "the gradient of rank 1 holds a NaN or an infinity, first at step 3"
    for message in simulate_ranks(2, scenario):
        assert message.startswith(f"after 3 steps: {expected}")
