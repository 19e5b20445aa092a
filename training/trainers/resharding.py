"""Take over the state that a trainer's ranks stored: by the same ranks, or by another number."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

State: TypeAlias = dict[str, Any]
"""One rank's whole state: "model", "optimizer", "trainer", "random", and a loop's own entries."""

EntryPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry of a `State`; all tensors and numbers below them are meant."""

Rule: TypeAlias = Literal["mean", "sum"]


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
