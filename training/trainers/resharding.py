"""Take over the state that a trainer's ranks stored: by the same ranks, or by another number."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

State: TypeAlias = dict[str, Any]
"""One rank's whole state: "model", "optimizer", "trainer", "random", and a loop's own entries."""

EntryPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry of a `State`; all tensors and numbers below them are meant."""

Rule: TypeAlias = Literal["mean", "sum", "stripe", "own", "shared"]


def _no_stripes(num_ranks: int) -> Sequence[int]:
    raise AssertionError(f"a plan without stripes was asked for those of {num_ranks} ranks")


@dataclass(frozen=True, slots=True)
class ReshardingPlan:
    """Say by which rule new ranks take over each entry; an entry without rule is shared.

    - "mean" is the mean over the models, each held by equally many consecutive ranks.
    - "sum" is a sum over ranks: new rank i of N' takes those of old ranks i, i + N', i + 2 N', ...
    - "stripe" is a rank's piece of one vector, in rank order: new ranks cut the whole at
      `stripe_bounds(N')`, N' + 1 indices from 0 to its length.
    - "own" means something on one rank alone: new ranks begin with zeros.
    - "shared" is the same on all ranks: old rank 0's is taken.
    """

    num_models: int = 1
    rules: Mapping[EntryPath, Rule] = field(default_factory=dict)
    stripe_bounds: Callable[[int], Sequence[int]] = _no_stripes


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
