"""Models of bfloat16 and float16: what ranks share is float32, and rounding is no training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, all_equal, minibatch, sgd, small_model, weights
from training.checkpoints.training_state import load_whole_state, reshard, whole_state
from training.distributed.simulated_group import simulate_ranks
from training.settings.trainers import AdaGrad, AdaGradPlace, TopK
from training.tensor_encoding import decode_state, encode_state
from training.trainers import Bmuf, Gtc, Htm, OneBit, SparseLoco, Synchronous, Trainer
from training.trainers.parameters import FlatParameters

pytestmark = pytest.mark.chaos

BLOCK_SIZE, TAU = 2, 1 / 64
TOP_K = TopK(density=0.5, bits=4)
# Three models: their mean is a sum of which no bfloat16 has all bits.
TRAINERS: dict[str, tuple[int, Callable[..., Trainer]]] = {
    "synchronous": (3, Synchronous),
    "gtc": (3, partial(Gtc, gradient_threshold=TAU)),
    "bmuf": (3, partial(Bmuf, block_size=BLOCK_SIZE)),
    "bmuf as printed": (3, partial(Bmuf, block_size=BLOCK_SIZE, form="as_printed")),
    "model averaging": (3, partial(Bmuf, block_size=BLOCK_SIZE, block_momentum=0.0)),
    "bmuf top-k": (3, partial(Bmuf, block_size=BLOCK_SIZE, block_exchange=TOP_K)),
    "sparse_loco": (3, partial(SparseLoco, block_size=BLOCK_SIZE, density=0.5)),
    "one_bit": (3, partial(OneBit, adagrad=AdaGrad(place=AdaGradPlace.NOWHERE))),
    "htm": (6, partial(Htm, group_size=2, block_size=BLOCK_SIZE, gradient_threshold=TAU)),
}


def build(group: ProcessGroup, name: str, kind: torch.dtype) -> tuple[Any, Any, Trainer]:
    model = small_model().to(kind)
    optimizer = sgd(model, 0.0 if name == "one_bit" else 0.9)
    return model, optimizer, TRAINERS[name][1](model, optimizer, group=group)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    inputs, targets = minibatch(step, rank)
    optimizer.zero_grad()
    outputs = model(inputs.to(next(model.parameters()).dtype)).float()
    (nn.functional.cross_entropy(outputs, targets, reduction="sum") / 6).backward()
    optimizer.step()


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for settings in optimizer.param_groups:
        settings["lr"] = rate


def train(group: ProcessGroup, name: str, kind: torch.dtype, rate: float, num_steps: int) -> Tensor:
    model, optimizer, trainer = build(group, name, kind)
    set_rate(optimizer, rate)
    with trainer:
        for step in range(num_steps):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


@pytest.mark.parametrize("name", TRAINERS)
def test_at_rate_0_nothing_drifts(name: str) -> None:
    """After 30 blocks not a bit has changed."""
    kind = torch.float16 if name == "htm" else torch.bfloat16
    final, *_ = simulate_ranks(TRAINERS[name][0], train, name, kind, 0.0, 30 * BLOCK_SIZE)
    assert torch.equal(final, weights(small_model().to(kind)))


def coast(group: ProcessGroup, name: str) -> list[dict[str, Any]]:
    """Train for three blocks, then at rate 0; the trainer's state after each of those blocks."""
    model, optimizer, trainer = build(group, name, torch.bfloat16)
    states = []
    with trainer:
        for step in range(7 * BLOCK_SIZE):
            if step == 3 * BLOCK_SIZE:
                set_rate(optimizer, 0.0)
            take_step(model, optimizer, step, group.rank())
            if step >= 3 * BLOCK_SIZE - 1 and (step + 1) % BLOCK_SIZE == 0:
                states.append(trainer.state_dict())
    return states


@pytest.mark.parametrize("name", ["bmuf", "bmuf as printed", "htm"])
def test_rounding_is_no_update(name: str) -> None:
    """At rate 0 a float32 global model moves by eta Delta and no bit more, though ranks round."""
    first, *rest = simulate_ranks(TRAINERS[name][0], coast, name)[0]
    eta = first["block_filter"]["block_momentum"]
    for parameter, start in first["global_model"].items():
        model, update = start, first["update"][parameter]
        for state in rest:
            update = eta * update
            model = model + update
            if name == "bmuf as printed":
                model = model + eta * update
            assert torch.equal(state["update"][parameter], update)
            assert torch.equal(state["global_model"][parameter], model)
        assert not torch.equal(model, model.bfloat16().float())


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("synchronous", 0.05),
        ("gtc", 0.1),
        ("bmuf", 0.05),
        ("bmuf as printed", 0.05),
        ("bmuf top-k", 0.1),
        ("sparse_loco", 0.15),
        ("one_bit", 0.1),
        ("htm", 0.1),
    ],
)
def test_trains_as_float32_does(name: str, tolerance: float) -> None:
    """After 10 blocks a model of bfloat16 is where one of float32 is, within a share of its way."""
    num_ranks, _ = TRAINERS[name]
    half, whole = (
        simulate_ranks(num_ranks, train, name, kind, 0.05, 10 * BLOCK_SIZE)[0].float()
        for kind in (torch.bfloat16, torch.float32)
    )
    way = (whole - weights(small_model())).norm()
    assert float((half - whole).norm() / way) < tolerance


def train_in_parts(group: ProcessGroup, name: str, parts: list[range]) -> Tensor:
    model, optimizer, trainer = build(group, name, torch.bfloat16)
    for part in parts:
        with trainer:
            for step in part:
                take_step(model, optimizer, step, group.rank())
    return weights(model)


@pytest.mark.parametrize(
    "name", ["bmuf", "bmuf as printed", "model averaging", "bmuf top-k", "sparse_loco", "htm"]
)
def test_leaving_at_a_blocks_end_changes_nothing(name: str) -> None:
    """Entering again resumes from the float32 global model, not from what the parameters kept."""
    num_ranks, num_steps = TRAINERS[name][0], 5 * BLOCK_SIZE
    parts = [range(first, first + BLOCK_SIZE) for first in range(0, num_steps, BLOCK_SIZE)]
    left = simulate_ranks(num_ranks, train_in_parts, name, parts)
    never_left = simulate_ranks(num_ranks, train_in_parts, name, [range(num_steps)])
    assert torch.equal(left[0], never_left[0])
    assert all_equal(left)


def save(group: ProcessGroup, name: str, num_steps: int) -> bytes:
    parts = build(group, name, torch.bfloat16)
    with parts[2]:
        for step in range(num_steps):
            take_step(parts[0], parts[1], step, group.rank())
        return encode_state(whole_state(*parts))


def resume(group: ProcessGroup, name: str, states: list[bytes], until: int) -> Tensor:
    parts = build(group, name, torch.bfloat16)
    if group.size() == len(states):
        state = decode_state(states[group.rank()])
    else:
        decoded = map(decode_state, states)
        state = reshard(decoded, len(states), group.rank(), group.size(), type(parts[2]))
    load_whole_state(state, *parts)
    with parts[2]:
        for step in range(parts[2].num_steps, until):
            take_step(parts[0], parts[1], step, group.rank())
    return weights(parts[0])


@pytest.mark.parametrize("name", TRAINERS)
def test_checkpoints_hold_float32(name: str) -> None:
    """State is float32, and training resumes bitwise from within a block."""
    num_ranks, num_steps = TRAINERS[name][0], 4 * BLOCK_SIZE
    states = simulate_ranks(num_ranks, save, name, 2 * BLOCK_SIZE + 1)
    own = decode_state(states[0])["trainer"]
    vectors = [
        own.get(key, {}) for key in ("residuals", "global_model", "broadcast_model", "update")
    ]
    assert {each.dtype for part in vectors for each in part.values()} <= {torch.float32}
    resumed = simulate_ranks(num_ranks, resume, name, states, num_steps)
    expected = simulate_ranks(num_ranks, train, name, torch.bfloat16, 0.05, num_steps)
    assert torch.equal(resumed[0], expected[0])


@pytest.mark.parametrize("num_new", [1, 2])
def test_other_ranks_resume_from_the_exact_mean(num_new: int) -> None:
    """Resharding within a block gives what leaving gives: a mean in float32, then rounded."""
    states = simulate_ranks(3, save, "bmuf", 2 * BLOCK_SIZE + 1)
    left = simulate_ranks(3, train, "bmuf", torch.bfloat16, 0.05, 2 * BLOCK_SIZE + 1)
    resharded = simulate_ranks(num_new, resume, "bmuf", states, 2 * BLOCK_SIZE + 1)
    assert torch.equal(resharded[0], left[0])


def sum_once(group: ProcessGroup) -> Tensor:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with Synchronous(model, torch.optim.SGD(model.parameters(), lr=0.0), group=group) as trainer:
        model.weight.grad = torch.full_like(model.weight, 1.0 if group.rank() == 0 else 2.0**-8)
        trainer.optimizer.step()
    assert model.weight.grad is not None
    return model.weight.grad


def test_gradients_are_summed_before_they_are_rounded(rank_pool: RankPool) -> None:
    """1 + 3/256 rounds to 1 + 4/256; added one by one in bfloat16, the three would be lost."""
    for gradient in rank_pool.run(4, sum_once):
        assert gradient == 1 + 4 / 256


def feed_small_gradients(group: ProcessGroup) -> Tensor:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Gtc(model, optimizer, group=group, gradient_threshold=1.0):
        for _ in range(1024):
            model.weight.grad = torch.full_like(model.weight, 2.0**-10)
            optimizer.step()
    return weights(model)


def test_the_residual_keeps_small_gradients() -> None:
    """1,024 gradients of tau / 1,024 are sent; a bfloat16 residual would stop at a quarter."""
    moved, *_ = simulate_ranks(1, feed_small_gradients)
    assert torch.equal(moved.float(), torch.tensor([-1.0]))


class MixedModel(nn.Module):
    """MixedModel has a layer of bfloat16, one of float16, and one of float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Linear(rows, columns, dtype=kind)
            for rows, columns, kind in [
                (5, 4, torch.bfloat16),
                (4, 4, torch.float16),
                (4, 3, torch.float32),
            ]
        )

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values.tanh().to(layer.weight.dtype))
        return values


def train_mixed(
    group: ProcessGroup, name: str, steps: range, states: list[bytes]
) -> tuple[nn.Module, bytes]:
    """Take steps, from a rank's state if there is one; return the model, and the state before."""
    model = MixedModel()
    optimizer = sgd(model, 0.0 if name == "one_bit" else 0.9)
    trainer = TRAINERS[name][1](model, optimizer, group=group)
    if states:
        load_whole_state(decode_state(states[group.rank()]), model, optimizer, trainer)
    with trainer:
        for step in steps:
            take_step(model, optimizer, step, group.rank())
        state = encode_state(whole_state(model, optimizer, trainer))
    return model, state


@pytest.mark.parametrize("name", TRAINERS)
def test_types_may_be_mixed(name: str) -> None:
    """Parameters of three types train as one vector, keep their types, and resume bitwise."""
    num_ranks, _ = TRAINERS[name]
    first = range(2 * BLOCK_SIZE + 1)
    states = [state for _, state in simulate_ranks(num_ranks, train_mixed, name, first, [])]
    rest = range(len(first), 4 * BLOCK_SIZE)
    resumed, _ = simulate_ranks(num_ranks, train_mixed, name, rest, states)[0]
    whole, _ = simulate_ranks(num_ranks, train_mixed, name, range(4 * BLOCK_SIZE), [])[0]
    assert torch.equal(weights(resumed), weights(whole))
    for trained, start in zip(whole.parameters(), MixedModel().parameters(), strict=True):
        assert trained.dtype == start.dtype
        assert not torch.equal(trained, start)


def test_parameters_on_several_devices_are_refused() -> None:
    """One vector lies on one device."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match="trained parameters on 2 devices: need one device"):
        FlatParameters(model, sgd(model))
