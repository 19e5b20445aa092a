"""Take over the state that a trainer's ranks stored: by the same ranks, or by another number."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from torch import Tensor

from training.algorithms.block_filter import BlockFilter, BlockState

State: TypeAlias = dict[str, Any]
"""One rank's whole state: "model", "optimizer", "trainer", "random", and a loop's own entries."""

EntryPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry of a `State`; all tensors and numbers below them are meant."""

Rule: TypeAlias = Literal["mean", "sum"]

BLOCK_VECTORS = tuple(each.name for each in fields(BlockState))
"""The vectors of a block's state, by the names that a checkpoint gives them."""


@dataclass(frozen=True, slots=True)
class ReshardingPlan:
    """Say by which rule new ranks take over each entry; an entry without rule is shared.

    "mean" is the mean over the models, each held by equally many consecutive ranks. "sum" is a sum
    over ranks: new rank i of N' takes those of old ranks i, i + N', i + 2 N', ... A shared entry is
    the same on all ranks: old rank 0's is taken.
    """

    num_models: int = 1
    rules: Mapping[EntryPath, Rule] = field(default_factory=dict)


def check_settings(state: Mapping[str, Any], own: Mapping[str, object]) -> None:
    """Raise ValueError where a checkpoint was written with other settings than the `own`."""
    for name, value in own.items():
        # Checkpoints of earlier versions lack some.
        if state.get(name, value) != value:
            raise ValueError(
                f"{name}: the checkpoint was written with {state[name]!r}, this trainer has "
                f"{value!r}: give the trainer {name}={state[name]!r}, or load model and optimizer "
                "alone to begin with other settings"
            )


def check_block(state: Mapping[str, Any], block_size: int, num_models: int) -> None:
    """Raise ValueError where BMUF's state is within a block that cannot be ended as it began."""
    # Within a block the N models differ, and eta belongs to this N by eq. (5).
    if state["is_open"] and state["num_models"] != num_models:
        raise ValueError(
            f"the checkpoint is within a block of {state['num_models']} models, now there are "
            f"{num_models}: end the block by training.checkpoints.resharding"
        )
    if state["is_open"] and state["num_steps_in_block"] >= block_size:
        raise ValueError(
            f"block_size = {block_size}: the checkpoint is {state['num_steps_in_block']} steps "
            f"into a block of {state.get('block_size', 'more')}: need a block_size above "
            f"{state['num_steps_in_block']}, or a checkpoint of a block's end"
        )


def is_within_block(trainer: Mapping[str, Any]) -> bool:
    """Return whether BMUF's state is within a block, where the models of ranks differ."""
    return bool(trainer["is_open"] and trainer["num_steps_in_block"] > 0)


def end_block(state: State) -> State:
    """End a block of BMUF in a resharded whole state, whose model is the mean of the models."""
    trainer = state["trainer"]
    if not trainer["is_open"] or "update" not in trainer:
        return state
    ended = state
    if is_within_block(trainer):
        ended = {**state, "trainer": trainer | _ended_block(trainer, state["model"])}
        if trainer["optimizer_state"] == "reset":
            ended["optimizer"] = {**state["optimizer"], "state": {}}
    # New ranks start from W, not from the look-ahead W + eta Delta.
    return {**ended, "model": {**state["model"], **ended["trainer"]["global_model"]}}


def _ended_block(trainer: Mapping[str, Any], mean_model: Mapping[str, Tensor]) -> dict[str, Any]:
    """Filter the mean of the models, a parameter at a time (000 eqs. 2-4)."""
    block_filter = BlockFilter(**trainer["block_filter"])
    ended: dict[str, Any] = {part: {} for part in BLOCK_VECTORS} | {"num_steps_in_block": 0}
    # The filter is elementwise, so parameters one by one give the bits of the whole vector.
    for name in trainer["update"]:
        mean = mean_model[name]
        before = BlockState(*(trainer[part][name].reshape(-1) for part in BLOCK_VECTORS))
        after = block_filter.end_block(before, mean.reshape(-1))
        for part in BLOCK_VECTORS:
            ended[part][name] = getattr(after, part).view(mean.shape)
    return ended
