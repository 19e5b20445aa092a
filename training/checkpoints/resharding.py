"""Fold the states of all ranks, mid-block too, into the state of a rank among another number.

The rule is what leaving the trainer does: models are averaged and the block is ended, so that all
ranks start from one model. Momenta are averaged too. What counts as a sum over ranks, residuals and
a sub-epoch's totals, is dealt: new rank i gets the sum of old ranks i, i + N', i + 2 N', ...
"""

import hashlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from training.algorithms.block_filter import BlockFilter, BlockState

State: TypeAlias = dict[str, Any]
Values: TypeAlias = dict[tuple[str | int, ...], Any]


def fold(states: Iterable[State], num_old: int, rank: int, num_new: int) -> State:
    """State of rank `rank` of `num_new` ranks from those of `num_old`, which come in rank order.

    One state at a time is held. What no rule is stated for is old rank 0's.
    """
    states = iter(states)
    first = next(states)
    # Ranks of one HTM group hold the same model: the first of each takes part in the mean.
    num_models = first["trainer"].get("num_models", 1)
    stride = num_old // num_models
    means, sums = _averaged(first), _dealt(first)
    if rank > 0:
        sums = {name: _zero(value) for name, value in sums.items()}
    for old_rank, state in enumerate(states, start=1):
        if old_rank % stride == 0:
            means = _added(means, _averaged(state))
        if old_rank % num_new == rank:
            sums = _added(sums, _dealt(state))
    if num_models > 1:
        means = {name: value / num_models for name, value in means.items()}
    return _assembled(first, means, sums) | {"random": _seed(first, rank, num_new)}


def _averaged(state: State) -> Values:
    """What each model has its own of: trained parameters within a block, and momenta."""
    values: Values = {}
    if _is_within_block(state):
        values = {("model", name): state["model"][name] for name in state["trainer"]["update"]}
    for number, of_parameter in state["optimizer"]["state"].items():
        for name, value in of_parameter.items():
            # Step counters have no shape, and are equal anyway.
            if isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point():
                values["optimizer", number, name] = value
    return values


def _dealt(state: State) -> Values:
    """What counts as a sum over ranks, of which each rank has a part."""
    return {
        **{
            ("residuals", name): part
            for name, part in state["trainer"].get("residuals", {}).items()
        },
        **{("totals", name): part for name, part in state.get("totals", {}).items()},
    }


def _added(first: Values, second: Values) -> Values:
    return {name: value + second[name] for name, value in first.items()}


def _zero(value: Any) -> Any:  # noqa: ANN401
    return torch.zeros_like(value) if isinstance(value, Tensor) else type(value)()


def _is_within_block(state: State) -> bool:
    trainer = state["trainer"]
    return bool(trainer["is_open"] and trainer.get("num_steps_in_block", 0) > 0)


def _assembled(first: State, means: Values, sums: Values) -> State:
    optimizer = {
        **first["optimizer"],
        "state": {
            number: {
                name: means.get(("optimizer", number, name), value) for name, value in of.items()
            }
            for number, of in first["optimizer"]["state"].items()
        },
    }
    trainer = {**first["trainer"], "is_open": False}
    model = first["model"]
    if "residuals" in trainer:
        trainer["residuals"] = {name: sums["residuals", name] for name in trainer["residuals"]}
    if "update" in trainer and first["trainer"]["is_open"]:
        if _is_within_block(first):
            trainer |= _ended_block(trainer, means)
            if trainer["optimizer_state"] == "reset":
                optimizer["state"] = {}
        model = {**model, **trainer["global_model"]}
    totals = {name: sums["totals", name] for name in first.get("totals", {})}
    return {**first, "model": model, "optimizer": optimizer, "trainer": trainer, "totals": totals}


def _ended_block(trainer: State, means: Values) -> State:
    """The trainer's block state once the block ends with the mean of the models (000 eqs. 2-4)."""
    block_filter = BlockFilter(**trainer["block_filter"])
    parts = ("global_model", "broadcast_model", "update")
    ended: State = {part: {} for part in parts} | {"num_steps_in_block": 0}
    for name in trainer["update"]:
        mean = means["model", name]
        before = BlockState(*(trainer[part][name].reshape(-1) for part in parts))
        after = block_filter.end_block(before, mean.reshape(-1))
        for part in parts:
            ended[part][name] = getattr(after, part).view(mean.shape)
    return ended


def _seed(first: State, rank: int, num_new: int) -> State:
    """A seed for the new rank's random numbers, from old rank 0's random state."""
    old = first["random"]["cpu"].numpy().tobytes()
    digest = hashlib.sha256(old + f"rank {rank} of {num_new}".encode()).digest()
    return {"seed": int.from_bytes(digest[:6], "big")}
