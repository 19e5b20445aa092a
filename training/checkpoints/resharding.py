"""Checkpoint resharding: one rank's state among a new number of ranks, from the states of all.

The rule is that of leaving the trainer: models are averaged and the block is ended, so that all
ranks start from one model. The optimizer's moments are averaged too. The sums over ranks, such as
residuals and a sub-epoch's totals, remain sums.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from training.checkpoints.training_state import seed_of
from training.trainers.replica.optimizer_state import is_moment
from training.trainers.resharding import EntryPath, Rule, State
from training.trainers.trainer import Trainer


def reshard(
    states: Iterable[State], num_old: int, rank: int, num_new: int, trainer: type[Trainer]
) -> State:
    """Make the state of rank `rank` of `num_new` from those of `num_old`, given in rank order.

    One state at a time is held. `trainer` says how its own part is taken over; ValueError if the
    states are another trainer's.
    """
    states = iter(states)
    first = next(states)
    trainer.check_own_state(first["trainer"])
    plan = trainer.resharding_plan(first)
    rules = {**plan.rules, **_own_rules(first)}
    taken = {path: _exact(_entry(first, path)) for path in rules}
    # Old rank 0's sums are new rank 0's, so the other ranks begin from zero.
    if rank > 0:
        taken |= {path: _zeros(taken[path]) for path, rule in rules.items() if rule == "sum"}
    # A group of HTM holds one model, so only its first rank enters the mean.
    ranks_per_model = num_old // plan.num_models
    for old_rank, state in enumerate(states, start=1):
        takes = {"mean": old_rank % ranks_per_model == 0, "sum": old_rank % num_new == rank}
        for path, rule in rules.items():
            if takes[rule]:
                taken[path] = _sum(taken[path], _exact(_entry(state, path)))
    resharded = first
    for path, value in taken.items():
        is_mean = rules[path] == "mean" and plan.num_models > 1
        resharded = _replaced(resharded, path, value / plan.num_models if is_mean else value)
    return trainer.end_resharding(resharded) | {
        # No old rank's random numbers fit a new rank.
        "random": {"seed": seed_of(first["random"], f"rank {rank} of {num_new}")}
    }


def _own_rules(state: State) -> dict[EntryPath, Rule]:
    """Average the optimizer's moments over the models; split a sub-epoch's totals."""
    rules: dict[EntryPath, Rule] = {
        ("optimizer", "state", number, name): "mean"
        for number, moments in state["optimizer"]["state"].items()
        for name, value in moments.items()
        if is_moment(name, value)
    }
    return rules | {("totals",): "sum"} if "totals" in state else rules


def _entry(state: Any, path: EntryPath) -> Any:  # noqa: ANN401
    for key in path:
        state = state[key]
    return state


def _replaced(state: Any, path: EntryPath, value: object) -> Any:  # noqa: ANN401
    if not path:
        return value
    return {**state, path[0]: _replaced(state[path[0]], path[1:], value)}


def _exact(value: Any) -> Any:  # noqa: ANN401
    """Widen bfloat16 and float16 to float32, in which sums and means keep what they add up."""
    if isinstance(value, dict):
        return {name: _exact(inner) for name, inner in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


def _sum(first: Any, second: Any) -> Any:  # noqa: ANN401
    if isinstance(first, dict):
        return {name: _sum(value, second[name]) for name, value in first.items()}
    return first + second


def _zeros(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {name: _zeros(inner) for name, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, Tensor) else type(value)()
