"""Ranks that come to train different things get an error that names the tensor and the rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parametrizations, prune

from infra.store.object_store import ObjectStore
from tests.training.trainers.ranks import (
    HTM,
    MIXING,
    RankPool,
    all_equal,
    sgd,
    small_model,
    take_step,
    weights,
)
from tests.training.trainers.ranks import TRAINERS as OF_ALL_TESTS
from training.checkpoints.checkpointer import Checkpointer
from training.checkpoints.training_state import whole_state
from training.distributed import collectives
from training.distributed.simulated_group import simulate_ranks
from training.settings.trainers import TopK
from training.trainers import Bmuf, Htm, OneBit, SparseLoco, Synchronous, Trainer
from training.trainers import trainer as trainer_module

EVERYTHING = TopK(density=1.0)
TRAINERS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    **{name: OF_ALL_TESTS[name] for name in ("synchronous", "gtc", "bmuf", "htm", *MIXING)},
    "bmuf top-k": (Bmuf, {"block_size": 3, "block_exchange": EVERYTHING}),
    "sparse_loco": (SparseLoco, {"block_size": 3, "density": 1.0, "ranks_per_leader": 2}),
    "htm top-k": (Htm, {**HTM, "block_exchange": EVERYTHING}),
    "htm in one tier": (Htm, {**HTM, "group_size": 4}),
    "one bit": (OneBit, {}),
    "one bit with double buffering": (OneBit, {"double_buffering": True}),
}
IN_CI = ("synchronous", "bmuf", "htm", "d_psgd", "one bit")
NAMES = [
    name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos)
    for name in sorted(TRAINERS)
]
"""One trainer of each kind of exchange; the others share its comparison."""

NUM_RANKS = 4
STEPS_BETWEEN = 4
Parts = tuple[nn.Module, torch.optim.Optimizer, Trainer]


@pytest.fixture(autouse=True)
def frequent_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulated ranks compare their replicas after every fourth step."""
    monkeypatch.setattr(trainer_module, "STEPS_BETWEEN_COMPARISONS", STEPS_BETWEEN)


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD, whose momentum 1-bit SGD has itself."""
    return sgd(model, 0.0 if TRAINERS[name][0] is OneBit else 0.9)


def build(group: ProcessGroup, name: str) -> Parts:
    model = small_model()
    optimizer = optimizer_for(name, model)
    trainer_class, settings = TRAINERS[name]
    return model, optimizer, trainer_class(model, optimizer, group=group, **settings)


def train(
    group: ProcessGroup,
    name: str,
    change: Callable[[Parts, int], None],
    num_steps: int,
    change_after: int,
) -> Tensor:
    """Take steps, after one of which this rank makes a change."""
    parts = build(group, name)
    with parts[2]:
        for step in range(num_steps):
            take_step(parts[0], parts[1], step, group.rank())
            if step + 1 == change_after:
                change(parts, group.rank())
    return weights(parts[0])


def unfreeze(parts: Parts, _: int) -> None:
    parts[0][2].bias.requires_grad_(False)


def add_group(parts: Parts, _: int) -> None:
    parts[1].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("name", NAMES)
def test_the_trained_set_is_that_of_entering(name: str) -> None:
    """A layer frozen between two steps, and a new parameter group, are named before the step."""
    with pytest.raises(ValueError, match=r"parameter 2\.bias was frozen.* enter it again"):
        simulate_ranks(NUM_RANKS, train, name, unfreeze, 3, 2)
    with pytest.raises(ValueError, match="a tensor was frozen, unfrozen, added to the optimizer"):
        simulate_ranks(NUM_RANKS, train, name, add_group, 3, 2)


def assign(parts: Parts, _: int) -> None:
    state = {name: tensor.clone() for name, tensor in parts[0].state_dict().items()}
    parts[0].load_state_dict(state, assign=True)


def adapt(parts: Parts, _: int) -> None:
    """As low-rank adapters do: the layer within another one, that has parameters beside it."""
    adapter = nn.Module()
    adapter.base, adapter.low_rank = parts[0][2], nn.Linear(7, 1)
    adapter.forward = parts[0][2].forward
    parts[0][2] = adapter


REPLACED: dict[str, tuple[Callable[[Parts, int], object], str]] = {
    "assigned": (assign, r"0\.weight was replaced in"),
    "adapted": (adapt, r"2\.weight was removed from"),
    "added": (
        lambda parts, _: parts[0].register_parameter("scale", nn.Parameter(torch.ones(1))),
        "scale was added to",
    ),
    "removed": (lambda parts, _: setattr(parts[0][2], "bias", None), r"2\.bias was removed from"),
    "pruned": (
        lambda parts, _: prune.l1_unstructured(parts[0][2], "weight", amount=0.5),
        r"2\.weight was removed from",
    ),
    "normed": (
        lambda parts, _: parametrizations.weight_norm(parts[0][2]),
        r"2\.weight was removed from",
    ),
}


@pytest.mark.parametrize("what", REPLACED)
def test_parameters_that_are_replaced_are_named(what: str) -> None:
    """Before the next step, and on leaving: the optimizer would train what the model left."""
    change, expected = REPLACED[what]
    message = f"parameter {expected} the model since the trainer was entered"
    is_left = what != "added"  # which leaves all that was trained in its place
    for name, num_steps in [("synchronous", 3), ("bmuf", 3), *[("synchronous", 2)] * is_left]:
        with pytest.raises(ValueError, match=message):
            simulate_ranks(2, train, name, change, num_steps, 2)


def thaw_between(group: ProcessGroup, name: str) -> dict[str, Any]:
    """Train with the first layer frozen, then with all; the last layer differs on every rank."""
    parts = build(group, name)
    model, optimizer, trainer = parts
    model[0].requires_grad_(False)
    trainer = type(trainer)(model, optimizer, group=group, **TRAINERS[name][1])
    with trainer:
        for step in range(4):
            take_step(model, optimizer, step, group.rank())
    state_before = trainer.state_dict()
    model[0].requires_grad_(True)
    with torch.no_grad():
        model[0].weight += group.rank()
    with trainer:
        first = weights(model)
        state = trainer.state_dict()
        for step in range(4, 11):
            take_step(model, optimizer, step, group.rank())
    return {"first": first, "last": weights(model), "before": state_before, "state": state}


@pytest.mark.parametrize("name", NAMES)
def test_entering_again_agrees_on_a_new_set(name: str) -> None:
    """An unfrozen tensor begins with rank 0's weights, residual 0 and update 0; others keep theirs.

    All are trained from then on, the same on all ranks.
    """
    ranks = simulate_ranks(NUM_RANKS, thaw_between, name)
    assert all_equal([rank["last"] for rank in ranks])
    unfrozen = slice(0, 35)  # the first layer's weight
    if name.startswith(("synchronous", "gtc", "one bit")):
        assert all_equal([rank["first"] for rank in ranks])
    assert not torch.any(ranks[0]["first"][unfrozen] == ranks[0]["last"][unfrozen])
    leader = ranks[2]  # others have no residual of a block
    for part in ("residuals", "update", "block_residuals"):
        if part in leader["state"]:
            before, after = leader["before"][part], leader["state"][part]
            assert before.keys() == {"2.weight", "2.bias"}
            assert not after["0.weight"].any()
            assert torch.equal(after["2.weight"], before["2.weight"])
            assert torch.any(after["2.weight"] != 0)


def step_another(parts: Parts, _: int) -> None:
    torch.optim.SGD(parts[0].parameters(), lr=0.1).step()


def step_another_only(group: ProcessGroup, name: str) -> None:
    model, _, trainer = build(group, name)
    other = sgd(model)
    with trainer:
        for step in range(4):
            take_step(model, other, step, group.rank())


def step_another_of_a_frozen_layer(group: ProcessGroup, name: str) -> None:
    model = nn.Sequential(small_model(), nn.Linear(3, 3))
    optimizer, other = optimizer_for(name, model[0]), sgd(model[1])
    trainer_class, settings = TRAINERS[name]
    with trainer_class(model, optimizer, group=group, **settings):
        take_step(model, optimizer, 0, group.rank())
        other.step()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_another_optimizer_is_refused(name: str) -> None:
    """Before it changes a parameter, trained or not, that no trainer exchanges for it."""
    with pytest.raises(ValueError, match=r"parameter 0\.weight: a step of another SGD"):
        simulate_ranks(NUM_RANKS, train, name, step_another, 2, 1)
    with pytest.raises(ValueError, match=r"parameter 0\.weight: a step of another SGD"):
        simulate_ranks(NUM_RANKS, step_another_only, name)
    with pytest.raises(ValueError, match=r"parameter 1\.weight: a step of another SGD"):
        simulate_ranks(NUM_RANKS, step_another_of_a_frozen_layer, name)


def train_by_two(group: ProcessGroup) -> Tensor:
    """Two optimizers, each with a trainer of its own, and a third of another model."""
    model, teacher = nn.Sequential(small_model(), nn.Linear(3, 3)), small_model()
    optimizers = [sgd(model[0]), sgd(model[1]), sgd(teacher)]
    with (
        Synchronous(model, optimizers[0], group=group),
        Bmuf(model, optimizers[1], group=group, block_size=3),
    ):
        for step in range(2 * STEPS_BETWEEN + 1):
            take_step(model, optimizers[0], step, group.rank())
            optimizers[1].step()
            take_step(teacher, optimizers[2], step, group.rank())
    return weights(model)


def test_two_trainers_share_a_model() -> None:
    """Each exchanges for its own optimizer, and a third of another model has none."""
    assert all_equal(simulate_ranks(2, train_by_two))


def enter_twice(group: ProcessGroup, name: str) -> None:
    model, optimizer, trainer = build(group, name)
    other = sgd(model) if name == "synchronous" else optimizer
    second = Synchronous(model, other, group=group)
    with trainer, second:
        pass


def make_within(group: ProcessGroup, name: str) -> None:
    model, optimizer, trainer = build(group, name)
    with trainer:
        Synchronous(model, optimizer, group=group)


@pytest.mark.parametrize("begin", [enter_twice, make_within])
@pytest.mark.parametrize("name", ["synchronous", "bmuf"])
def test_a_second_trainer_of_a_parameter_is_refused(
    begin: Callable[[ProcessGroup, str], None], name: str
) -> None:
    """Of the same optimizer, or of another one with the same tensors, while one is entered."""
    with pytest.raises(ValueError, match=r"parameter 0\.weight is trained by a trainer that is"):
        simulate_ranks(2, begin, name)


@torch.no_grad()
def drift(parts: Parts, rank: int) -> None:
    parts[0][2].weight[0, 0] += 1e-3 * (rank == 1)


@torch.no_grad()
def clip(parts: Parts, _: int) -> None:
    parts[0][2].weight.clamp_(-0.1, 0.1)


SHARED = [
    "synchronous",
    "gtc",
    "htm",
    "htm in one tier",
    "one bit",
    "one bit with double buffering",
]
"""Trainers whose ranks, or groups, share the parameters at every step."""


@pytest.mark.parametrize("name", SHARED)
def test_a_replica_that_drifts_is_found(name: str) -> None:
    """At the next comparison of the steps, and at leaving: it names tensor and rank, of many."""
    message = r"parameter 2\.weight: digest \w{16} on rank 1, digest \w{16} on rank 0: replicas"
    last = STEPS_BETWEEN + 5
    with pytest.raises(ValueError, match=message):
        simulate_ranks(NUM_RANKS, train, name, drift, last, 3)
    with pytest.raises(ValueError, match=message):
        simulate_ranks(NUM_RANKS, train, name, drift, 2, 2)


def agree_again(group: ProcessGroup) -> None:
    """Drift before the step whose replicas are compared; have one model again when leaving."""
    model, optimizer, trainer = build(group, "synchronous")
    with trainer:
        for step in range(STEPS_BETWEEN):
            if step + 1 == STEPS_BETWEEN:
                drift((model, optimizer, trainer), group.rank())
            take_step(model, optimizer, step, group.rank())
        for p in model.parameters():
            collectives.broadcast(p.detach(), group)


def test_leaving_looks_at_the_comparison_under_way() -> None:
    """No step follows that would report it, and the replicas are equal by now."""
    with pytest.raises(ValueError, match=r"parameter 2\.weight: digest \w{16} on rank 1"):
        simulate_ranks(NUM_RANKS, agree_again)


def test_real_ranks_find_a_drift(rank_pool: RankPool) -> None:
    """The comparison under way between gloo's ranks raises on every one of them."""
    for name in ("synchronous", "htm"):
        for message in rank_pool.errors(NUM_RANKS, drift_between, name):
            assert "parameter 2.weight: digest" in message
            assert "on rank 1, digest" in message


def drift_between(group: ProcessGroup, name: str) -> None:
    between = trainer_module.STEPS_BETWEEN_COMPARISONS  # of the rank's own process
    train(group, name, drift, between + 7, between - 1)


@pytest.mark.parametrize("name", NAMES)
def test_changes_that_all_ranks_make_are_legal(name: str) -> None:
    """Weights clipped after a step remain so: replicas are equal, or a block averages them."""
    last = STEPS_BETWEEN + 8
    assert all_equal(simulate_ranks(NUM_RANKS, train, name, clip, last, last - 7))


@pytest.mark.parametrize("name", ["bmuf", "htm"])
def test_what_leaving_would_undo_is_refused(name: str) -> None:
    """A change between a block's end and leaving would be replaced by the global model."""
    with pytest.raises(ValueError, match=r"parameter 2\.weight was changed in this block without"):
        simulate_ranks(NUM_RANKS, train, name, clip, 3, 3)


def change_rate(parts: Parts, rank: int) -> None:
    parts[1].param_groups[0]["lr"] = 0.01 if rank == 2 else 0.02


def change_rate_for_a_step(parts: Parts, rank: int) -> None:
    settings, is_odd = parts[1].param_groups[0], rank == 2
    settings["lr"] = 0.01 if is_odd else 0.05
    parts[1].register_step_post_hook(lambda *_: settings.update(lr=0.05))


def schedule(parts: Parts, _: int) -> None:
    parts[1].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_compared(name: str) -> None:
    """A rate of one rank is named; also one of a single step, which is set back afterwards."""
    with pytest.raises(ValueError, match=r"optimizer: .*'lr': 0\.01.* on rank 2, .* on rank 0"):
        simulate_ranks(NUM_RANKS, train, name, change_rate, 3, 2)
    with pytest.raises(ValueError, match=r"of the steps since entering: .* on rank 2"):
        simulate_ranks(NUM_RANKS, train, name, change_rate_for_a_step, 4, 2)
    assert all_equal(simulate_ranks(NUM_RANKS, train, name, schedule, 4, 2))


def change_frozen(group: ProcessGroup, name: str) -> None:
    """Average a frozen copy of the weights by hand, as some losses do."""
    model = nn.ModuleList([small_model(), small_model().requires_grad_(False)])
    optimizer = optimizer_for(name, model[0])
    trainer_class, settings = TRAINERS[name]
    with trainer_class(model, optimizer, group=group, **settings):
        for step in range(2):
            take_step(model[0], optimizer, step, group.rank())
            with torch.no_grad():
                for average, parameter in zip(
                    model[1].parameters(), model[0].parameters(), strict=True
                ):
                    average.lerp_(parameter, 0.5)


def test_frozen_parameters_must_be_equal() -> None:
    """Of different models within a block their averages differ, and no equation averages them."""
    simulate_ranks(NUM_RANKS, change_frozen, "synchronous")
    with pytest.raises(ValueError, match=r"parameter 1\.0\.weight: digest"):
        simulate_ranks(NUM_RANKS, change_frozen, "bmuf")


def enter_with_other_groups(group: ProcessGroup) -> None:
    model = small_model()
    parts = [list(model[0].parameters()), list(model[2].parameters())]
    first, second = parts if group.rank() < 3 else reversed(parts)
    settings = [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01}]
    with Synchronous(model, torch.optim.SGD(settings), group=group):
        pass


def test_parameter_groups_are_compared() -> None:
    """Equal rates of groups that hold other tensors are other rates of each tensor."""
    message = (
        r"place of parameter 0\.weight: 0 of parameter group 1 on rank 3, 0 of .* group 0 on r"
    )
    with pytest.raises(ValueError, match=message):
        simulate_ranks(NUM_RANKS, enter_with_other_groups)


def enter_with_other_momentum(group: ProcessGroup, name: str) -> None:
    model, optimizer, trainer = build(group, name)
    if group.rank() == 0:  # as one who restores on rank 0 alone
        take_step(model, optimizer, 0, 0)
    with trainer:
        pass


def test_optimizer_state_is_compared_on_entering() -> None:
    """Trainers that sum gradients; BMUF's ranks keep their own."""
    with pytest.raises(ValueError, match=r"momentum_buffer of parameter 0\.weight: digest.*rank 0"):
        simulate_ranks(NUM_RANKS, enter_with_other_momentum, "gtc")
    simulate_ranks(NUM_RANKS, enter_with_other_momentum, "bmuf")


def save_drifted(group: ProcessGroup, folder: Path, name: str) -> None:
    parts = build(group, name)
    checkpoints = Checkpointer(ObjectStore((str(folder),)), str(folder), "mine", group)
    with parts[2]:
        take_step(parts[0], parts[1], 0, group.rank())
        checkpoints.save(1, whole_state(*parts))
        drift(parts, group.rank())
        checkpoints.save(2, whole_state(*parts))


@pytest.mark.parametrize("name", ["synchronous", "htm"])
def test_drifted_ranks_are_not_saved(tmp_path: Path, name: str) -> None:
    """The error comes before anything is stored; the checkpoint before it remains."""
    with pytest.raises(ValueError, match=r"parameter 2\.weight: digest \w{16} on rank 1"):
        simulate_ranks(NUM_RANKS, save_drifted, tmp_path, name)
    assert {path.name[:12] for path in tmp_path.iterdir()} == {"000000000001"}
