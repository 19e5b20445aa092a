"""The state of 1-bit SGD: whole checkpoints, other numbers of ranks, other trained tensors."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import all_equal, sgd, small_model, take_step, weights
from training.algorithms.one_bit import columns_of, stripes_of
from training.checkpoints.training_state import load_whole_state, reshard, whole_state
from training.distributed.simulated_group import simulate_ranks
from training.settings.trainers import AdaGrad, AdaGradPlace
from training.tensor_encoding import decode_state, encode_state
from training.trainers import OneBit
from training.trainers.trainer import State

NUM_STEPS = 5
SIZE = 66
STRIPED = ("stripe_residual", "velocity", "squares")


def build(group: ProcessGroup, settings: dict[str, Any]) -> tuple[Any, Any, OneBit]:
    model = small_model()
    optimizer = sgd(model, 0.0)
    return model, optimizer, OneBit(model, optimizer, group=group, **settings)


def stop(group: ProcessGroup, settings: dict[str, Any], num_steps: int = NUM_STEPS) -> bytes:
    parts = build(group, settings)
    with parts[2]:
        for step in range(num_steps):
            take_step(parts[0], parts[1], step, group.rank())
        return encode_state(whole_state(*parts))


def saved(num_ranks: int, **settings: Any) -> list[State]:
    return [decode_state(state) for state in simulate_ranks(num_ranks, stop, settings)]


def resharded(states: list[State], num_new: int) -> list[State]:
    return [reshard(states, len(states), rank, num_new, OneBit) for rank in range(num_new)]


def total(states: list[State]) -> Tensor:
    """The sum of the ranks' first residuals."""
    vectors = [
        torch.cat([each.reshape(-1) for each in state["trainer"]["residuals"].values()])
        for state in states
    ]
    return torch.stack(vectors).sum(0)


def bounds(num_ranks: int) -> list[int]:
    """The cuts of the model's parameters between whole columns."""
    shapes = {name: p.shape for name, p in small_model().named_parameters()}
    return [stripe.first_element for stripe in stripes_of(columns_of(shapes), num_ranks)] + [SIZE]


@pytest.mark.parametrize("num_new", [1, 2, 3, 5])
def test_other_ranks_take_over_residuals_and_stripes(num_new: int) -> None:
    """The sum of first residuals is kept, and each stripe's vector is cut between other columns."""
    old = saved(4)
    new = resharded(old, num_new)
    torch.testing.assert_close(total(new), total(old), rtol=0, atol=1e-6)
    assert total(old).abs().min() > 0
    for name in STRIPED:
        pieces = [state["trainer"][name] for state in new]
        whole = torch.cat([state["trainer"][name] for state in old])
        assert len(whole) == SIZE
        assert torch.equal(torch.cat(pieces), whole)
        cuts = bounds(num_new)
        assert [len(piece) for piece in pieces] == [b - a for a, b in pairwise(cuts)]
    assert all(state["trainer"]["weight"] == NUM_STEPS for state in new)


def test_squares_of_partial_gradients_are_averaged() -> None:
    """New ranks begin with the mean of the old ranks' estimates."""
    old = saved(4, adagrad=AdaGrad(place=AdaGradPlace.PARTIAL))
    mean = torch.stack([state["trainer"]["squares"] for state in old]).mean(0)
    assert not torch.equal(old[0]["trainer"]["squares"], mean)
    for state in resharded(old, 3):
        torch.testing.assert_close(state["trainer"]["squares"], mean, rtol=1e-6, atol=0)


def resume(
    group: ProcessGroup, settings: dict[str, Any], states: list[bytes], steps: range
) -> tuple[list[Tensor], OneBit]:
    parts = build(group, settings)
    load_whole_state(decode_state(states[group.rank()]), *parts)
    models = [weights(parts[0])]
    with parts[2]:
        for step in steps:
            take_step(parts[0], parts[1], step, group.rank())
            models.append(weights(parts[0]))
    return [*models, weights(parts[0])], parts[2]


@pytest.mark.parametrize("num_new", [1, 2, 5])
def test_an_update_that_waits_is_applied_by_other_ranks(num_new: int) -> None:
    """The model is that of the step, and the first step of new ranks applies the update."""
    settings = {"double_buffering": True}
    old = saved(4, **settings)
    model, update = old[0]["model"], old[0]["trainer"]["pending_update"]
    assert all(update[name].any() for name in update)
    states = [encode_state(state) for state in resharded(old, num_new)]
    ranks = simulate_ranks(num_new, resume, settings, states, range(NUM_STEPS, NUM_STEPS + 1))
    expected = torch.cat([(model[name] - 0.05 * update[name]).reshape(-1) for name in update])
    for models, _ in ranks:
        torch.testing.assert_close(models[1], expected, rtol=0, atol=1e-7)
        assert torch.equal(models[-1], ranks[0][0][-1])


def test_a_rank_alone_takes_up_what_more_ranks_had_not_sent() -> None:
    """Of momentum 0.9 and both residuals, its first step applies all: it will quantize nothing."""
    plain = {"adagrad": AdaGrad(place=AdaGradPlace.NOWHERE)}
    (state,) = resharded(saved(4, **plain), 1)
    residual, trainer = total([state]), state["trainer"]
    assert residual.any()
    assert trainer["stripe_residual"].any()
    ((models, one),) = simulate_ranks(1, resume, plain, [encode_state(state)], range(5, 6))
    gradient = -(models[1] - models[0]) / 0.05
    gradient -= 0.9 * trainer["velocity"] + residual + trainer["stripe_residual"]
    torch.testing.assert_close(gradient, own_gradient(state["model"]), rtol=0, atol=1e-5)
    after = one.state_dict()
    assert not total([{"trainer": after}]).any()
    assert not after["stripe_residual"].any()


def own_gradient(weights_of: dict[str, Tensor]) -> Tensor:
    """The gradient of step 5 on rank 0."""
    model = small_model()
    model.load_state_dict(weights_of)
    take_step(model, torch.optim.SGD(model.parameters(), lr=0.0), 5, 0)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_another_number_of_ranks_needs_resharding() -> None:
    """A rank's stripe means nothing to other numbers of ranks."""
    states = simulate_ranks(4, stop, {})
    with pytest.raises(ValueError, match=r"is of 4 ranks, .* group has 2: reshard it"):
        simulate_ranks(2, resume, {}, states, range(0))


def thaw(group: ProcessGroup, place: str, is_first_frozen: bool) -> dict[str, Any]:
    """Train with a layer frozen, or with all; then with the other choice. The state around that."""
    model = small_model()
    model[0].requires_grad_(not is_first_frozen)
    optimizer = sgd(model, 0.0)
    adagrad = AdaGrad(place=AdaGradPlace(place))
    trainer = OneBit(model, optimizer, group=group, adagrad=adagrad)
    with trainer:
        for step in range(4):
            take_step(model, optimizer, step, group.rank())
    before = trainer.state_dict()
    model[0].requires_grad_(is_first_frozen)
    with trainer:
        after = trainer.state_dict()
        num_bytes = trainer.statistics()["bytes_sent"]
        for step in range(4, 8):
            take_step(model, optimizer, step, group.rank())
    assert (trainer.statistics()["bytes_sent"] > num_bytes > 0) == (group.size() > 1)
    return {"before": before, "after": after, "last": weights(model)}


def whole(ranks: list[dict[str, Any]], when: str, name: str) -> Tensor:
    return torch.cat([rank[when][name] for rank in ranks])


@pytest.mark.parametrize("place", ["aggregate", "partial"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_stripes_follow_the_tensors_that_are_trained(num_ranks: int, place: str) -> None:
    """Momentum and both residuals of the last layer are kept; those of the first begin with 0.

    AdaGrad begins from zero with new tensors: with the weight of four steps and squares of none
    their first step would be twice as long.
    """
    unfrozen = simulate_ranks(num_ranks, thaw, place, True)
    assert all_equal([rank["last"] for rank in unfrozen])
    for name in ("velocity", "stripe_residual"):
        before, after = (whole(unfrozen, when, name) for when in ("before", "after"))
        assert torch.equal(after, torch.cat([torch.zeros(42), before]))
    assert whole(unfrozen, "before", "velocity").any()
    assert not whole(unfrozen, "after", "squares").any()
    assert unfrozen[0]["after"]["weight"] == 0


@pytest.mark.parametrize("place", ["aggregate", "partial"])
def test_freezing_drops_what_belongs_to_the_frozen(place: str) -> None:
    """The other tensors keep all of their state, AdaGrad's too."""
    frozen = simulate_ranks(3, thaw, place, False)
    assert all_equal([rank["last"] for rank in frozen])
    for name in ("velocity", "stripe_residual"):
        assert torch.equal(whole(frozen, "after", name), whole(frozen, "before", name)[42:])
    if place == "aggregate":
        squares = whole(frozen, "before", "squares")
        assert torch.equal(whole(frozen, "after", "squares"), squares[42:])
    for rank in frozen:
        assert rank["after"]["weight"] == 4
        if place == "partial":
            assert torch.equal(rank["after"]["squares"], rank["before"]["squares"][42:])
        assert rank["after"]["residuals"].keys() == {"2.weight", "2.bias"}
