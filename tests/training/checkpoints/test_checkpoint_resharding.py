"""Checkpoint resharding gives what leaving the trainer gives; no residual and no total is lost."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import HTM, all_equal, sgd, small_model, take_step, weights
from tests.training.trainers.ranks import TRAINERS as RANK_TRAINERS
from training.algorithms.block_filter import BlockFilter, BlockState
from training.checkpoints.training_state import load_whole_state, reshard, whole_state
from training.distributed.simulated_group import simulate_ranks
from training.tensor_encoding import decode_state, encode_state
from training.trainers import Bmuf, Gtc, Htm, SparseLoco, Trainer
from training.trainers.bmuf import BLOCK_VECTORS
from training.trainers.trainer import State

TRAINERS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    **{
        name: made
        for name, made in RANK_TRAINERS.items()
        if not name.startswith("one_bit") and name not in ("bmuf average", "bmuf reset")
    },
    "sparse_loco": (SparseLoco, {"block_size": 3}),
    "htm in one tier": (Htm, {**HTM, "group_size": 4}),
}


def num_ranks_of(name: str) -> int:
    """So many that there are two models, or one."""
    return 2 if name.startswith(("bmuf", "sparse")) or name.endswith("psgd") else 4


def build(group: ProcessGroup, name: str, **other: Any) -> tuple[Any, Any, Trainer]:
    trainer_class, settings = TRAINERS[name]
    model = small_model()
    optimizer = sgd(model)
    return model, optimizer, trainer_class(model, optimizer, group=group, **(settings | other))


def stop(group: ProcessGroup, name: str, num_steps: int) -> tuple[bytes, Any, Any]:
    """The whole state after some steps; the model and the trainer's state once it is left."""
    parts = build(group, name)
    with parts[2]:
        for step in range(num_steps):
            take_step(parts[0], parts[1], step, group.rank())
        state = encode_state(whole_state(*parts))
    return state, weights(parts[0]), parts[2].state_dict()


def resume(
    group: ProcessGroup, name: str, states: list[bytes], settings: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model that another number of ranks begins with, and what they make of it."""
    parts = build(group, name, **settings)
    decoded = map(decode_state, states)
    state = reshard(decoded, len(states), group.rank(), group.size(), type(parts[2]))
    load_whole_state(state, *parts)
    first = weights(parts[0])
    with parts[2]:
        for step in range(parts[2].num_steps, parts[2].num_steps + 4):
            take_step(parts[0], parts[1], step, group.rank())
    return first, weights(parts[0])


def cases() -> Iterator[tuple[str, int]]:
    """Name trainers and steps; of those with a code, only steps at which a block ends."""
    for name, (_, trainer_settings) in sorted(TRAINERS.items()):
        has_code = name == "sparse_loco" or "block_exchange" in trainer_settings
        yield from ((name, num_steps) for num_steps in ((3,) if has_code else (2, 3, 4)))


@pytest.mark.parametrize(("name", "num_steps"), cases())
def test_resharding_gives_what_leaving_gives(name: str, num_steps: int) -> None:
    """Bitwise: the model, both block models and the filtered update, after any step of a block.

    Of two models: of more, gloo's ring adds in another order.
    """
    num_old = num_ranks_of(name)
    states, models, left = zip(*simulate_ranks(num_old, stop, name, num_steps), strict=True)
    for rank, num_new in ((0, 1), (2, 5)):
        trainer_class = TRAINERS[name][0]
        resharded = reshard(map(decode_state, states), num_old, rank, num_new, trainer_class)
        model = small_model(seed=7)
        model.load_state_dict(resharded["model"])
        assert torch.equal(weights(model), models[0])
        trainer = resharded["trainer"]
        assert trainer.keys() == left[0].keys()
        for key in trainer.keys() - {"residuals", "block_residuals"}:
            assert_same(trainer[key], left[0][key])


@pytest.mark.parametrize("name", ["bmuf top-k", "htm top-k", "sparse_loco"])
def test_within_a_block_resharding_takes_the_exact_mean(name: str) -> None:
    """Leaving would send a code of the changes; states hold them whole, and residuals remain."""
    num_old = num_ranks_of(name)
    states = [state for state, _, _ in simulate_ranks(num_old, stop, name, 4)]
    decoded = [decode_state(state) for state in states]
    before = decoded[0]["trainer"]
    block_filter = BlockFilter(**before["block_filter"])
    resharded = reshard(iter(decoded), num_old, 0, 1, TRAINERS[name][0])
    models = [decoded[rank]["model"] for rank in range(0, num_old, num_old // 2)]
    for parameter, (first, second) in zip(
        models[0], zip(*map(dict.values, models), strict=True), strict=True
    ):
        vectors = [before[part][parameter].flatten() for part in BLOCK_VECTORS]
        ended = block_filter.end_block(BlockState(*vectors), ((first + second) / 2).flatten())
        assert torch.equal(resharded["model"][parameter].flatten(), ended.global_model)
        residuals = sum(each["trainer"]["block_residuals"][parameter] for each in decoded)
        assert torch.equal(resharded["trainer"]["block_residuals"][parameter], residuals)


class TiedModel(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def stop_tied(group: ProcessGroup) -> tuple[bytes, torch.Tensor]:
    torch.manual_seed(1)
    model = TiedModel()
    optimizer = sgd(model)
    with (trainer := Bmuf(model, optimizer, group=group, block_size=3)):
        take_step(model, optimizer, 0, group.rank())
        state = encode_state(whole_state(model, optimizer, trainer))
    return state, weights(model)


def test_tied_weights_are_averaged_under_all_their_names() -> None:
    """As they are by leaving."""
    states, models = zip(*simulate_ranks(2, stop_tied), strict=True)

    def load(group: ProcessGroup) -> torch.Tensor:
        model = TiedModel()
        optimizer = sgd(model)
        trainer = Bmuf(model, optimizer, group=group, block_size=3)
        state = reshard(map(decode_state, states), 2, 0, 1, Bmuf)
        load_whole_state(state, model, optimizer, trainer)
        return weights(model)

    assert torch.equal(simulate_ranks(1, load)[0], models[0])


def assert_same(first: Any, second: Any) -> None:
    if not isinstance(first, dict):
        assert first == second
        return
    assert first.keys() == second.keys()
    for name, value in first.items():
        same: Callable[..., Any] = torch.equal if isinstance(value, torch.Tensor) else assert_same
        assert same(value, second[name]) in (True, None)


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_training_resumes_on_another_number_of_ranks(name: str, num_new: int) -> None:
    """All ranks begin with one model and end with another; the count of steps continues."""
    num_steps = max(number for case, number in cases() if case == name)
    states, models, _ = zip(*simulate_ranks(num_ranks_of(name), stop, name, num_steps), strict=True)
    group_size = {"group_size": min(num_new, 3)} if name.startswith("htm") else {}
    first, last = zip(*simulate_ranks(num_new, resume, name, list(states), group_size), strict=True)
    assert all_equal(list(last))
    assert not torch.equal(first[0], last[0])
    # The look-ahead of the new number of models aside, it begins where leaving would end.
    assert torch.equal(first[0], models[0])


def test_momenta_are_averaged_over_models() -> None:
    """Each of HTM's groups counts once, though it has two ranks."""
    states, _, _ = zip(*simulate_ranks(4, stop, "htm", 4), strict=True)
    resharded = reshard(map(decode_state, states), 4, 0, 3, Htm)
    leaders = [decode_state(states[rank])["optimizer"]["state"] for rank in (0, 2)]
    for number, values in resharded["optimizer"]["state"].items():
        both = [leader[number]["momentum_buffer"] for leader in leaders]
        assert not torch.equal(*both)
        assert torch.equal(values["momentum_buffer"], sum(both) / 2)


def state_of(residuals: list[int], num_frames: int, rank: int) -> State:
    return {
        "model": {"weight": torch.ones(2)},
        "optimizer": {"state": {}, "param_groups": []},
        "trainer": {
            "trainer": "Gtc",
            "is_open": True,
            "num_steps": 3,
            "residuals": {"weight": torch.tensor(residuals, dtype=torch.float32)},
        },
        "totals": {"num_frames": num_frames, "cross_entropy": num_frames / 2},
        "random": {"cpu": torch.Generator().manual_seed(rank).get_state()},
        "curve": [1],
    }


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_what_is_summed_over_ranks_is_conserved(num_old: int, num_new: int, data) -> None:
    """Residuals and a sub-epoch's totals, exact for whole numbers; none is counted twice."""
    residuals = data.draw(
        st.lists(
            st.lists(st.integers(-99, 99), min_size=2, max_size=2),
            min_size=num_old,
            max_size=num_old,
        )
    )
    frames = data.draw(st.lists(st.integers(0, 999), min_size=num_old, max_size=num_old))
    resharded = [
        reshard(map(state_of, residuals, frames, range(num_old)), num_old, rank, num_new, Gtc)
        for rank in range(num_new)
    ]
    residuals_taken = torch.stack([state["trainer"]["residuals"]["weight"] for state in resharded])
    assert torch.equal(residuals_taken.sum(0), torch.tensor(residuals).sum(0).float())
    assert sum(state["totals"]["num_frames"] for state in resharded) == sum(frames)
    assert sum(state["totals"]["cross_entropy"] for state in resharded) == sum(frames) / 2
    if num_new >= num_old:  # with no fewer ranks, each old rank's residual remains as it is
        assert residuals_taken[:num_old].tolist() == residuals
        assert not residuals_taken[num_old:].any()
    assert all(state["curve"] == [1] for state in resharded)


def test_new_ranks_draw_numbers_of_their_own() -> None:
    """Seeds differ by rank, by the number of ranks and by old rank 0's state, and repeat."""

    def seed(old: int, rank: int, num_new: int) -> int:
        states = [state_of([0, 0], 0, old), state_of([0, 0], 0, 0)]
        return reshard(states, 2, rank, num_new, Gtc)["random"]["seed"]

    cases = [(old, rank, n) for old in (1, 2) for n in (1, 3) for rank in range(n)]
    seeds = [seed(*case) for case in cases]
    assert len(set(seeds)) == len(cases)
    assert seeds == [seed(*case) for case in cases]


def test_no_more_than_two_states_are_held() -> None:
    """Beside rank 0's only the state just read is in memory, however many ranks wrote."""
    models: list[weakref.ref[torch.Tensor]] = []

    def states() -> Iterator[State]:
        for rank in range(6):
            assert [number for number, model in enumerate(models) if model() is not None] == [
                number for number in range(rank) if number in (0, rank - 1)
            ]
            state = state_of([1, 2], 3, rank)
            models.append(weakref.ref(state["model"]["weight"]))
            yield state
            del state

    reshard(states(), 6, 1, 2, Gtc)
    assert len(models) == 6
