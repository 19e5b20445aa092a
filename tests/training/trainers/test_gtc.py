"""Gradient threshold compression: between real ranks, and in messages of a fixed length."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.algorithms.gtc.interpreted import cuda_encoding
from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.algorithms.gtc.encoding import num_map_words
from training.checkpoints.training_state import load_whole_state, whole_state
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Gtc, Htm, Synchronous, gtc
from training.trainers.gtc import MIN_CAPACITY, ExactMessages, FixedMessages, capacity_for

TAU = 2.0


def integer_gradient(step: int, rank: int, largest: int, p: nn.Parameter) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-largest, largest + 1, p.shape, generator=generator).float()


def train_on_integers(group: ProcessGroup, largest: int) -> dict[str, Any]:
    """SGD with learning rate 1 from zero weights, so that -weights is the sum of what was applied.

    The last rank never has a gradient.
    """
    model = nn.Linear(9, 6)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with Gtc(model, optimizer, group=group, gradient_threshold=TAU) as trainer:
        for step in range(7):
            optimizer.zero_grad()
            if group.rank() < max(1, group.size() - 1):
                for name, p in model.named_parameters():
                    p.grad = integer_gradient(step, group.rank(), largest, p)
                    total[name] += p.grad
            optimizer.step()
        residuals = trainer.state_dict()["residuals"]
    applied = {name: -p.detach() for name, p in model.named_parameters()}
    return {"total": total, "applied": applied, "residuals": residuals}


def train(group: ProcessGroup, gradient_threshold: float | None) -> Tensor:
    model = small_model()
    optimizer = sgd(model)
    trainer_class = (
        Synchronous
        if gradient_threshold is None
        else partial(Gtc, gradient_threshold=gradient_threshold)
    )
    with trainer_class(model, optimizer, group=group):
        for step in range(4):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


@pytest.mark.parametrize("largest", [1, 3, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_nothing_is_lost(rank_pool: RankPool, num_ranks: int, largest: int) -> None:
    """Applied + all residuals = all gradients, exactly: sparse, dense and empty messages."""
    ranks = rank_pool.run(num_ranks, train_on_integers, largest)
    for name in ("weight", "bias"):
        assert all_equal([rank["applied"][name] for rank in ranks])
        residual = sum(rank["residuals"][name] for rank in ranks)
        total = sum(rank["total"][name] for rank in ranks)
        assert torch.equal(ranks[0]["applied"][name] + residual, total)


def test_a_rank_applies_what_it_sent(rank_pool: RankPool) -> None:
    """Even alone a rank applies multiples of the threshold, never its raw gradient."""
    (rank,) = rank_pool.run(1, train_on_integers, 3)
    assert torch.all(rank["applied"]["weight"] % TAU == 0)
    assert torch.any(rank["applied"]["weight"] != 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_threshold_zero_is_unquantized(rank_pool: RankPool, num_ranks: int) -> None:
    """gradient_threshold = 0 is synchronous SGD, bitwise."""
    assert all_equal(rank_pool.run(num_ranks, train, 0.0) + rank_pool.run(num_ranks, train, None))


NUM_ELEMENTS = 400
NUM_LARGE = 17 * MIN_CAPACITY


def gradients(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    largest = 1 + 3 * (step % 3)  # steps of few elements and of many
    return torch.randint(-largest, largest + 1, (NUM_ELEMENTS,), generator=generator).float()


def exchange(group: ProcessGroup, is_fixed: bool) -> tuple[list[Tensor], Tensor]:
    """Each step's counts, and the residual at the end."""
    residual = torch.zeros(NUM_ELEMENTS)
    messages = (FixedMessages if is_fixed else ExactMessages)(residual, TAU)
    steps = [gradients(step, group.rank()) for step in range(6)]
    return [messages.sum_signs(residual, step, group).clone() for step in steps], residual


def test_fixed_messages_are_exact_ones() -> None:
    """As long as nothing overflows, all counts and residuals are those of exact messages."""
    fixed, exact = (simulate_ranks(3, exchange, is_fixed) for is_fixed in (True, False))
    for one, other in zip(fixed, exact, strict=True):
        assert all(torch.equal(*counts) for counts in zip(one[0], other[0], strict=True))
        assert torch.equal(one[1], other[1])


def burst(rank: int) -> Tensor:
    """More elements than the least capacity has room for, and fewer than would be a map."""
    generator = torch.Generator().manual_seed(rank)
    return TAU * (torch.rand(NUM_LARGE, generator=generator) < 0.061).float()


def overflow(group: ProcessGroup, num_before: int) -> tuple[list[Tensor], Tensor, list[int]]:
    """Bursts after steps of nothing; after `num_before` steps resume from residual and state alone.

    Returns each step's counts, the residual at the end, and each step's capacity.
    """
    residual = torch.zeros(NUM_LARGE)
    messages = FixedMessages(residual, TAU)
    sent, capacities = [], []
    for step in range(5):
        if step == num_before:
            state = messages.state()
            messages = FixedMessages(residual, TAU)
            messages.restore(state)
        gradient = burst(group.rank()) if step in (1, 4) else torch.zeros(NUM_LARGE)
        sent.append(messages.sum_signs(residual, gradient, group))
        capacities.append(messages.capacity)
    return sent, residual, capacities


@pytest.fixture(scope="module")
def overflowing() -> tuple[list[Tensor], Tensor, list[int]]:
    return simulate_ranks(1, overflow, 9)[0]


def test_what_overflows_is_sent_later(overflowing: tuple[list[Tensor], Tensor, list[int]]) -> None:
    """The length follows what there was to send; a burst waits a step, and nothing is lost."""
    sent, residual, capacities = overflowing
    assert int(sent[1].sum()) == MIN_CAPACITY
    assert torch.equal(TAU * (sent[1] + sent[2]), burst(0))
    assert torch.equal(TAU * sent[4] + residual, burst(0))
    room_for_all, few = num_map_words(NUM_LARGE), MIN_CAPACITY
    assert capacities == [room_for_all, few, room_for_all, few, few]


def test_state_is_what_later_messages_depend_on(
    overflowing: tuple[list[Tensor], Tensor, list[int]],
) -> None:
    """Resuming from `state()` is bitwise equal to never having stopped, where messages overflow."""
    undisturbed, residual, _ = overflowing
    assert not torch.equal(undisturbed[1], undisturbed[4]), "one begins where the other ended"
    ((again, residual_again, _),) = simulate_ranks(1, overflow, 4)
    assert all(torch.equal(*counts) for counts in zip(undisturbed, again, strict=True))
    assert torch.equal(residual, residual_again)


def train_by_htm(group: ProcessGroup, stop: int) -> tuple[Tensor, int]:
    """A step of nothing, then a burst; from `stop` on by new objects and the whole state.

    Returns the model at the end, and the length of messages that the state held.
    """
    state: dict[str, Any] = {}
    for steps in (range(stop), range(stop, 2)):
        model = nn.Linear(1, NUM_LARGE, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = Htm(
            model, optimizer, group=group, group_size=2, block_size=4, gradient_threshold=TAU
        )
        if state:
            load_whole_state(state, model, optimizer, trainer)
        with trainer:
            for step in steps:
                gradient = burst(group.rank()) if step == 1 else torch.zeros(NUM_LARGE)
                model.weight.grad = gradient[:, None]
                optimizer.step()
            if not state:
                state = deepcopy(whole_state(model, optimizer, trainer))
    return model.weight.detach().clone(), state["trainer"]["message_capacity"]


@pytest.mark.chaos
def test_htms_checkpoint_holds_the_messages_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming is bitwise never having stopped, where a new trainer would send all at once."""
    monkeypatch.setattr(gtc, "ExactMessages", FixedMessages)
    (undisturbed, _), *_ = simulate_ranks(4, train_by_htm, 2)
    (resumed, capacity), *_ = simulate_ranks(4, train_by_htm, 1)
    assert capacity == MIN_CAPACITY < int(burst(0).count_nonzero())
    assert torch.equal(resumed, undisturbed)


def with_a_nan(group: ProcessGroup, how: str) -> tuple[str, Tensor]:
    residual = torch.zeros(NUM_ELEMENTS)
    messages = FixedMessages(residual, TAU)
    gradient = torch.full((NUM_ELEMENTS,), 3.0)
    if group.rank() == 1:
        gradient[7] = float("nan")
    counts = messages.sum_signs(residual, gradient, group)
    try:
        if how == "step":
            messages.sum_signs(residual, torch.zeros(NUM_ELEMENTS), group)
        elif how == "check":
            messages.check()
        else:
            messages.state()
    except FloatingPointError as error:
        return str(error), counts
    return "no error", counts


@pytest.mark.parametrize("how", ["step", "check", "state"])
def test_a_nan_stops_all_ranks(how: str) -> None:
    """One rank's NaN adds nothing, and ends training on every rank, by name, a step later."""
    for message, counts in simulate_ranks(3, with_a_nan, how):
        assert "the gradient of rank 1 holds a NaN" in message
        assert torch.all(counts == 2)


@pytest.mark.parametrize(
    ("num_wanted", "capacity"),
    [(0, 8192), (4096, 8192), (4097, 16384), (100_000, 262_144), (900_000, 1_562_500)],
)
def test_capacity_is_twice_what_was_wanted(num_wanted: int, capacity: int) -> None:
    """Powers of two between a block and the whole map."""
    assert capacity_for(num_wanted, 25_000_000) == capacity


def test_least_capacity_serves_a_block_whole() -> None:
    """Else an element could wait for ever."""
    assert MIN_CAPACITY >= cuda_encoding.BLOCK_ELEMENTS
