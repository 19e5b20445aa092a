"""Loading a checkpoint of other settings: refused by name, or taken over as defined."""

from typing import Any

import pytest
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import all_equal, sgd, small_model, take_step, weights
from training.checkpoints.training_state import load_whole_state, whole_state
from training.distributed.simulated_group import simulate_ranks
from training.tensor_encoding import decode_state, encode_state
from training.trainers import Bmuf, Htm, Trainer

BLOCK = {"block_size": 4, "block_momentum": 0.5}
GROUPS = BLOCK | {"group_size": 2, "gradient_threshold": 1 / 64}
LAST_STEP = 15


def stop(group: ProcessGroup, make: type[Trainer], settings: dict[str, Any], steps: int) -> bytes:
    """The whole state after `steps` steps; after -1 the state of having left."""
    model = small_model()
    optimizer = sgd(model)
    trainer = make(model, optimizer, group=group, **settings)
    with trainer:
        for step in range(abs(steps)):
            take_step(model, optimizer, step, group.rank())
        if steps >= 0:
            return encode_state(whole_state(model, optimizer, trainer))
    return encode_state(whole_state(model, optimizer, trainer))


def resume(
    group: ProcessGroup, make: type[Trainer], settings: dict[str, Any], states: list[bytes]
) -> tuple[list[int], Tensor]:
    """The steps after which all ranks have one model, and the model that is left."""
    model = small_model(seed=9)
    optimizer = sgd(model)
    trainer = make(model, optimizer, group=group, **settings)
    load_whole_state(decode_state(states[group.rank()]), model, optimizer, trainer)
    within = []
    with trainer:
        while trainer.num_steps < LAST_STEP:
            take_step(model, optimizer, trainer.num_steps, group.rank())
            within.append(weights(model))
    return within, weights(model)


def run(
    make: type[Trainer],
    before: dict[str, Any],
    after: dict[str, Any],
    steps: int,
    num_ranks: int = 4,
) -> tuple[list[int], Tensor]:
    states = simulate_ranks(num_ranks, stop, make, before, steps)
    ranks = simulate_ranks(num_ranks, resume, make, after, states)
    assert all_equal([left for _, left in ranks])
    first = LAST_STEP - len(ranks[0][0]) + 1
    together = [
        first + number
        for number, models in enumerate(zip(*(within for within, _ in ranks), strict=True))
        if all_equal(list(models))
    ]
    return together, ranks[0][1]


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("form", "as_printed", "'nesterov'"),
        ("block_momentum", 0.25, "0.5"),
        ("block_learning_rate", 0.5, "1.0"),
        ("optimizer_state", "reset", "'keep'"),
        ("gradient_threshold", 1 / 32, "0.015625"),
    ],
)
@pytest.mark.parametrize("steps", [2, -4])
def test_other_settings_are_refused(name: str, value: object, written: str, steps: int) -> None:
    """Within a block and after leaving; the message names both values and the remedy."""
    message = f"{name}: the checkpoint was written with {written}, this trainer has {value!r}: give"
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        run(Htm, GROUPS, GROUPS | {name: value}, steps)


def test_groups_of_another_size_are_refused_within_a_block() -> None:
    """As many models of more ranks each are no continuation; after leaving, any groups are."""
    states = simulate_ranks(4, stop, Htm, GROUPS, 2) * 2
    with pytest.raises(ValueError, match="group_size: the checkpoint was written with 2, this tr"):
        simulate_ranks(8, resume, Htm, GROUPS | {"group_size": 4}, states)
    left = simulate_ranks(4, stop, Htm, GROUPS, -3) * 2
    ranks = simulate_ranks(8, resume, Htm, GROUPS | {"group_size": 4}, left)
    assert all_equal([model for _, model in ranks])


@pytest.mark.parametrize("block_size", [2, 3])
def test_a_block_longer_than_the_new_size_is_refused(block_size: int) -> None:
    """At three steps it would never end by `==`; the message names both sizes."""
    message = f"block_size = {block_size}: the checkpoint is 3 steps into a block of 4: need"
    with pytest.raises(ValueError, match=message):
        run(Bmuf, BLOCK, BLOCK | {"block_size": block_size}, 3)


@pytest.mark.parametrize(
    ("block_size", "steps", "together"),
    [
        (3, 2, [3, 6, 9, 12, 15]),  # within a block, which ends at the new size
        (4, 2, [4, 8, 12]),
        (6, 2, [6, 12]),
        (3, 4, [7, 10, 13]),  # at a block's end
        (3, -4, [7, 10, 13]),  # after leaving
        (1, -3, list(range(4, 16))),
    ],
)
def test_another_block_size_is_taken_over(block_size: int, steps: int, together: list[int]) -> None:
    """The block under way ends at the new size, and later blocks have it."""
    found, _ = run(Bmuf, BLOCK, BLOCK | {"block_size": block_size}, steps)
    assert found == together
