"""Blockwise model-update filtering: ranks train alone, and meet at a block's end (003 VI-B)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from infra.ranges import Range, check_ranges
from training.algorithms.block_filter import (
    BlockFilter,
    BlockState,
    Form,
    block_momentum_for,
)
from training.distributed import collectives
from training.trainers.resharding import EntryPath, ReshardingPlan, Rule, State
from training.trainers.trainer import Trainer

OptimizerState = Literal["keep", "average", "reset"]


class Bmuf(Trainer):
    """Bmuf averages the ranks' models every `block_size` steps, and filters the average.

    `block_momentum` None follows from zeta / (N (1 - eta)) = C, with `momentum_constant` C.
    `optimizer_state` says what becomes of the optimizer's momenta at a block's end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: ProcessGroup,
        block_size: int,
        block_learning_rate: float = 1.0,
        block_momentum: float | None = None,
        momentum_constant: float = 1.0,
        form: Form = "nesterov",
        optimizer_state: OptimizerState = "keep",
    ) -> None:
        super().__init__(model, optimizer, group=group)
        check_block_size(block_size)
        if optimizer_state not in ("keep", "average", "reset"):
            raise ValueError(
                f"optimizer_state = {optimizer_state!r}: need 'keep', 'average' or 'reset'"
            )
        # Eq. (5) of 000 sets eta; with zeta = C = 1 it is 1 - 1/N.
        if block_momentum is None:
            block_momentum = block_momentum_for(
                self.num_models, block_learning_rate, momentum_constant
            )
        self.block_size = block_size
        self.filter = BlockFilter(block_learning_rate, block_momentum, form)
        self.optimizer_state = optimizer_state
        self.num_steps_in_block = 0
        self._state: BlockState | None = None

    @property
    def num_models(self) -> int:
        """Count the different models that a block's end averages, N of the equations."""
        return self.group.size()

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        return super().settings() | {
            "block_size": self.block_size,
            "block_filter": self.filter,
            "optimizer_state": self.optimizer_state,
            "num_steps_in_block": self.num_steps_in_block,
        }

    def exchange_gradients(self) -> None:
        """Exchange nothing: within a block each rank applies its own gradients."""
        # Intra-block parallel optimization is local SGD, without any synchronization (003 VI-B).
        self.parameters.fill_missing_gradients()

    def average(self, values: Tensor) -> None:
        """Replace `values` by their mean over the models."""
        collectives.all_reduce_mean(values, self.group)

    def begin(self) -> None:
        """Start a block from the shared model and the update that an earlier stage left."""
        # Without Delta(t-1) the first block of each stage would move without block momentum.
        update = None if self._state is None else self._state.update
        self._start_block(self.filter.begin(self.parameters.weights(), update))

    def end_step(self) -> None:
        """Count the step; at the block's end, synchronize."""
        self.num_steps_in_block += 1
        if self.num_steps_in_block == self.block_size:
            self.synchronize()

    def synchronize(self) -> None:
        """Average the models, filter, and start the next block from the result."""
        assert self._state is not None
        # Eq. (1) of 000 averages the N models; every rank weighs the same, however few its frames.
        mean_model = self.parameters.weights()
        self.average(mean_model)
        self._synchronize_optimizer()
        # Eqs. (2) to (4) run on every rank alike, so the new global model needs no broadcast.
        self._start_block(self.filter.end_block(self._state, mean_model))

    def conclude(self) -> None:
        """End a partial block; leave the global model, not the look-ahead, to be evaluated."""
        # A partial block moves the model by the same eta and zeta as a whole one.
        if self.num_steps_in_block > 0:
            self.synchronize()
        assert self._state is not None
        self.parameters.set_weights(self._state.global_model)

    def state_dict(self) -> dict[str, Any]:
        """Add the steps taken in the block, both models, the filtered update and the filter."""
        state = super().state_dict() | {
            "num_steps_in_block": self.num_steps_in_block,
            "num_models": self.num_models,
            "block_filter": asdict(self.filter),
            "optimizer_state": self.optimizer_state,
        }
        if self._state is not None:
            by_name = self.parameters.by_name
            state["global_model"] = by_name(self._state.global_model)
            state["broadcast_model"] = by_name(self._state.broadcast_model)
            state["update"] = by_name(self._state.update)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError within a block of another number of models."""
        super().load_state_dict(state)
        # Within a block the N models differ, and eta belongs to this N by eq. (5).
        if state["is_open"] and state["num_models"] != self.num_models:
            raise ValueError(
                f"the checkpoint is within a block of {state['num_models']} models, now there are "
                f"{self.num_models}: end the block by training.checkpoints.resharding"
            )
        self._state = None
        if "update" in state:
            flatten = self.parameters.flatten
            self._state = BlockState(
                flatten(state["global_model"]),
                flatten(state["broadcast_model"]),
                flatten(state["update"]),
            )
        self.num_steps_in_block = state["num_steps_in_block"]

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the models' trained parameters within a block, where they differ."""
        trainer = state["trainer"]
        rules: dict[EntryPath, Rule] = {}
        if _is_within_block(trainer):
            # Only within a block do the models differ; elsewhere rank 0's is everyone's.
            rules = {("model", name): "mean" for name in trainer["update"]}
        return ReshardingPlan(trainer["num_models"], rules)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """End the block with the mean of the models; new ranks start from the global model."""
        trainer, closed = state["trainer"], super().end_resharding(state)
        if not trainer["is_open"] or "update" not in trainer:
            return closed
        if _is_within_block(trainer):
            closed["trainer"] |= _ended_block(trainer, state["model"])
            if trainer["optimizer_state"] == "reset":
                closed["optimizer"] = {**state["optimizer"], "state": {}}
        # New ranks start from W, not from the look-ahead W + eta Delta.
        closed["model"] = {**state["model"], **closed["trainer"]["global_model"]}
        return closed

    def _start_block(self, state: BlockState) -> None:
        self._state = state
        self.num_steps_in_block = 0
        self.parameters.set_weights(state.broadcast_model)

    def _synchronize_optimizer(self) -> None:
        # The papers leave open what the optimizer's momenta become at a block's end.
        if self.optimizer_state == "reset":
            for parameter in self.parameters.named.values():
                self.optimizer.state.pop(parameter, None)
        elif self.optimizer_state == "average":
            self._average_optimizer()

    def _average_optimizer(self) -> None:
        """Average what has a parameter's shape; step counters are equal anyway."""
        momenta = [
            value
            for parameter in self.parameters.named.values()
            for _, value in sorted(self.optimizer.state[parameter].items())
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]
        if momenta:
            flat = torch.cat([momentum.reshape(-1) for momentum in momenta])
            self.average(flat)
            means = flat.split_with_sizes([momentum.numel() for momentum in momenta])
            for momentum, mean in zip(momenta, means, strict=True):
                momentum.copy_(mean.view(momentum.shape))


def _is_within_block(trainer: Mapping[str, Any]) -> bool:
    return bool(trainer["is_open"] and trainer["num_steps_in_block"] > 0)


def _ended_block(trainer: Mapping[str, Any], mean_model: Mapping[str, Tensor]) -> dict[str, Any]:
    """Filter the mean of the models, a parameter at a time (000 eqs. 2-4)."""
    block_filter = BlockFilter(**trainer["block_filter"])
    parts = ("global_model", "broadcast_model", "update")
    ended: dict[str, Any] = {part: {} for part in parts} | {"num_steps_in_block": 0}
    # The filter is elementwise, so parameters one by one give the bits of the whole vector.
    for name in trainer["update"]:
        mean = mean_model[name]
        before = BlockState(*(trainer[part][name].reshape(-1) for part in parts))
        after = block_filter.end_block(before, mean.reshape(-1))
        for part in parts:
            ended[part][name] = getattr(after, part).view(mean.shape)
    return ended


def check_block_size(block_size: int) -> None:
    """Raise ValueError for a block without steps."""
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}: need at least 1 step")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """BlockConfig: zeta, and C of eq. (5); the defaults are those of paper 000 3.2."""

    block_size: Annotated[int, Range(1, 1_000_000)] = 50
    block_learning_rate: Annotated[float, Range(1e-6, 1000)] = 1.0
    momentum_constant: Annotated[float, Range(1e-6, 1000)] = 1.0

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class BmufConfig(BlockConfig):
    """BMUF: the models of all ranks are averaged after every block of steps, and filtered."""

    name: Literal["bmuf"] = "bmuf"

    num_state_vectors: ClassVar[int] = 3
    """Both models of a block, and the filtered update."""

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks give a block momentum below 0."""
        del ranks_per_host
        block_momentum_for(num_ranks, self.block_learning_rate, self.momentum_constant)

    def make_trainer(self, model: nn.Module, optimizer: Optimizer, group: ProcessGroup) -> Bmuf:
        """Wrap model and optimizer; all ranks of `group` must call this together."""
        return Bmuf(
            model,
            optimizer,
            group=group,
            block_size=self.block_size,
            block_learning_rate=self.block_learning_rate,
            momentum_constant=self.momentum_constant,
        )
