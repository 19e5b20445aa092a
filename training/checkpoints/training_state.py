"""The whole state of training of a rank: model, optimizer, trainer and random numbers.

Resharding makes the states of a new number of ranks from those of all old ones. Its rule is that of
leaving the trainer: models are averaged and the block is ended, so that all ranks start from one
model. The optimizer's moments are averaged too. The sums over ranks, such as residuals and a
sub-epoch's totals, remain sums.
"""

import hashlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from infra.settings import printable
from training.trainers.parameters import plain_name
from training.trainers.replica import is_moment
from training.trainers.trainer import EntryPath, ReshardingPlan, Rule, State, Trainer


def whole_state(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> State:
    """Return all that training resumes from; this changes nothing and draws no random number.

    Names are those of the model without `torch.compile`.
    Store it before the next step: the tensors of model and optimizer are not copies. "claims" is
    not resumed from: `Checkpointer.save` compares it, and refuses ranks that have drifted apart.
    """
    random = {"cpu": torch.get_rng_state()}
    if trainer.parameters.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(trainer.parameters.device)
    return {
        "model": {plain_name(name): tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "trainer": trainer.state_dict(),
        "random": random,
        "claims": trainer.replica().claims().to_json(),
    }


def load_whole_state(
    state: State, model: nn.Module, optimizer: Optimizer, trainer: Trainer
) -> None:
    """Restore `whole_state()`, as it was stored or resharded; then enter the trainer.

    ValueError for a state of another model, optimizer or trainer.
    """
    # Either model, the stored one or this one, may be compiled, wholly or in parts.
    try:
        stored = {plain_name(name): tensor for name, tensor in state["model"].items()}
        own_names = {plain_name(name): name for name in model.state_dict()}
        model.load_state_dict({own_names.get(name, name): each for name, each in stored.items()})
        # Tied weights have several names in the model's state; only the trainer's is averaged.
        trained = {name: stored[name] for name in trainer.parameters.named}
        with torch.no_grad():
            trainer.parameters.set_weights(trainer.parameters.flatten(trained))
        optimizer.load_state_dict(state["optimizer"])
        trainer.load_state_dict(state["trainer"])
        _restore_random(state["random"], trainer.parameters.device)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        said = printable(f"{type(error).__name__}: {error}", 500)
        raise ValueError(
            f"the checkpoint holds another training's state ({said}): remove the checkpoints to "
            "train again from the start"
        ) from error


def _restore_random(random: State, device: torch.device) -> None:
    if "seed" in random:
        torch.manual_seed(random["seed"])
        return
    torch.set_rng_state(random["cpu"])
    if device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], device)
    elif device.type == "cuda":  # saved on a CPU, whose random numbers seed the GPU's
        torch.cuda.manual_seed(seed_of(random, "on a GPU"))
    elif "cuda" in random:
        # On a GPU the CPU's generator may never have moved: dropout would repeat its first masks.
        torch.manual_seed(seed_of(random, "on a CPU"))


def seed_of(random: State, purpose: str) -> int:
    """Draw a seed from a random state of any devices, the same one for the same purpose."""
    states = b"".join(random[name].numpy().tobytes() for name in sorted(random))
    return int.from_bytes(hashlib.sha256(states + purpose.encode()).digest()[:6], "big")


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
    # The optimizer's moments are averaged over the models, and a sub-epoch's totals are split.
    rules: dict[EntryPath, Rule] = {
        **plan.rules,
        **{
            ("optimizer", "state", number, name): "mean"
            for number, moments in first["optimizer"]["state"].items()
            for name, value in moments.items()
            if is_moment(name, value)
        },
    }
    if "totals" in first:
        rules["totals",] = "sum"
    # A group of HTM holds one model, so only its first rank enters the mean.
    ranks_per_model = num_old // plan.num_models
    taken = {path: _Taken(rule) for path, rule in rules.items()}
    resharded = first
    for old_rank, state in enumerate(chain([first], states)):
        takes = {
            "mean": old_rank % ranks_per_model == 0,
            # Old rank 0's sums are new rank 0's, so the other ranks begin from zero.
            "sum": old_rank % num_new == rank,
            "stripe": True,
            "own": False,
            "shared": old_rank == 0,
        }
        for path, rule in rules.items():
            taken[path].add(tree_map(_widened, _entry(state, path)), is_taken=takes[rule])
    for path, each in taken.items():
        resharded = _replaced(resharded, path, each.value(plan, rank, num_new))
    return trainer.end_resharding(resharded) | {
        # The state of random numbers cannot be carried over to another number of ranks.
        "random": {"seed": seed_of(first["random"], f"rank {rank} of {num_new}")}
    }


@dataclass(slots=True)
class _Taken:
    """_Taken is what a new rank has of an entry so far: a sum, or the pieces of a vector."""

    rule: Rule
    sum: Any = None
    stripes: list[Tensor] = field(default_factory=list)

    def add(self, entry: Any, *, is_taken: bool) -> None:  # noqa: ANN401
        """Take an old rank's entry, or know from it what the zeros are like."""
        if self.rule == "stripe":
            self.stripes.append(entry)
        elif self.sum is None:
            self.sum = entry if is_taken else tree_map(_zero, entry)
        elif is_taken:
            self.sum = tree_map(operator.add, self.sum, entry)

    def value(self, plan: ReshardingPlan, rank: int, num_new: int) -> Any:  # noqa: ANN401
        """Return the new rank's entry, from those of all old ranks."""
        if self.rule == "stripe":
            bounds = plan.stripe_bounds(num_new)
            # A copy, as a checkpoint would hold the whole vector with a view of it.
            return torch.cat(self.stripes)[bounds[rank] : bounds[rank + 1]].clone()
        is_mean = self.rule == "mean" and plan.num_models > 1
        return tree_map(lambda total: total / plan.num_models, self.sum) if is_mean else self.sum


def _entry(state: Any, path: EntryPath) -> Any:  # noqa: ANN401
    for key in path:
        state = state[key]
    return state


def _replaced(state: Any, path: EntryPath, value: object) -> Any:  # noqa: ANN401
    if not path:
        return value
    return {**state, path[0]: _replaced(state[path[0]], path[1:], value)}


def _widened(value: Any) -> Any:  # noqa: ANN401
    """Widen bfloat16 and float16 to float32, in which sums and means keep what they add up."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


def _zero(value: Any) -> Any:  # noqa: ANN401
    return torch.zeros_like(value) if isinstance(value, Tensor) else type(value)()
