"""Blockwise model-update filtering: ranks train alone, and meet at a block's end (003 VI-B)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.algorithms.block_filter import (
    BlockConfig,
    BlockFilter,
    Form,
    OptimizerState,
    block_momentum_for,
)
from training.distributed import collectives
from training.distributed.finiteness import FiniteCheck, FirstFault
from training.trainers.blocks import BlockModels, check_block, end_block, is_within_block
from training.trainers.replica.optimizer_state import average_moments
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import EntryPath, ReshardingPlan, Rule, State, check_settings
from training.trainers.statistics import BmufStatistics, HtmStatistics
from training.trainers.trainer import Trainer


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
        self._models = BlockModels(self.filter)
        self.optimizer_state = optimizer_state
        self.num_steps_in_block = 0
        self.num_blocks = 0
        self._look_for_faults()

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

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return the global model and the update; the parameters differ within a block."""
        return {**self._models.views("global_model", self.parameters), **self.shared_state()}

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the filtered update, from which the next block begins."""
        return self._models.views("update", self.parameters)

    def is_comparison_due(self) -> bool:
        """Return whether ranks compare their replicas after this step: at blocks' ends alone."""
        return self.num_steps_in_block + 1 >= self.block_size and super().is_comparison_due()

    def carry_over(self, old: FlatParameters) -> None:
        """Keep the update of tensors that are still trained; new ones begin with an update of 0."""
        self._models.carry_over(old, self.parameters)
        self._look_for_faults()

    def exchange_gradients(self) -> None:
        """Exchange nothing: within a block each rank applies its own gradients."""
        self._finite.check()
        self._fault.note(self.num_steps + 1, self.parameters.present_gradients())
        # Intra-block parallel optimization is local SGD, without any synchronization (003 VI-B).
        self.parameters.fill_missing_gradients()

    def average(self, values: Tensor) -> None:
        """Replace `values` by their mean over the models."""
        collectives.all_reduce_mean(values, self.group)

    def begin(self) -> None:
        """Start a block from the shared model and the update that an earlier stage left."""
        self._models.begin(self.parameters)
        self._start_counting()

    def end_step(self) -> None:
        """Count the step; at the block's end, synchronize."""
        self.num_steps_in_block += 1
        if self.num_steps_in_block >= self.block_size:
            self.synchronize()

    def synchronize(self) -> None:
        """Average the models, filter, and start the next block from the result."""
        # Eq. (1) of 000 averages N models of however few frames, which have moved them as much
        # less. Weights would count frames twice: 7 to 14 % more loss where ranks' classes differ.
        mean_model = self.parameters.weights()
        self.average(mean_model)
        self._finite.examine(self.num_steps, [mean_model], lambda: self._fault.step)
        self._synchronize_optimizer()
        self._models.end_block(mean_model, self.parameters)
        self._start_counting()
        self.num_blocks += 1

    def find_undone(self) -> str:
        """Return the error of a change since the block's end: leaving would replace it by W."""
        self._finite.check()
        if not self._is_open or self.num_steps_in_block > 0:
            return ""
        if not (name := self._models.first_difference(self.parameters)):
            return ""
        return (
            f"parameter {name} was changed in this block without a step of the trainer's "
            "optimizer, and leaving would undo it: step that optimizer, or change it after leaving"
        )

    def conclude(self) -> None:
        """End a partial block; leave the global model, not the look-ahead, to be evaluated."""
        # A partial block moves the model by the same eta and zeta as a whole one.
        if self.num_steps_in_block > 0:
            self.synchronize()
        self._finite.check()
        self.parameters.set_weights(self._models.state.global_model)

    def statistics(self) -> BmufStatistics | HtmStatistics:
        """Return the steps, the blocks, and the norm of the last block's filtered update."""
        return BmufStatistics(
            num_steps=self.num_steps, bytes_sent=self._traffic.num_bytes, **self._block_statistics()
        )

    def _block_statistics(self) -> dict[str, Any]:
        norm = self._models.update_norm()
        return {"num_blocks": self.num_blocks, "block_update_norm": norm}

    def state_dict(self) -> dict[str, Any]:
        """Add the place in the block, both models, the filtered update and the settings.

        Raises FloatingPointError where a gradient of this rank was not finite in this block.
        """
        self._finite.check()
        self._fault.check(self.group.rank())
        settings = {
            "num_steps_in_block": self.num_steps_in_block,
            "block_size": self.block_size,
            "num_models": self.num_models,
            "block_filter": asdict(self.filter),
            "optimizer_state": self.optimizer_state,
        }
        return super().state_dict() | settings | self._models.state_dict(self.parameters)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError for other settings, and in a block of other models.

        Another block size is taken over where the block is not too long for it already.
        """
        super().load_state_dict(state)
        check_block(state, self.block_size, self.num_models)
        own = {**asdict(self.filter), "optimizer_state": self.optimizer_state}
        if state["num_models"] != self.num_models:
            del own["block_momentum"]  # eq. (5) gives another number of models another one
        check_settings(state["block_filter"] | state, own)
        self._models.load_state_dict(state, self.parameters)
        self.num_steps_in_block = state["num_steps_in_block"]

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the models' trained parameters within a block, where they differ."""
        trainer = state["trainer"]
        rules: dict[EntryPath, Rule] = {}
        if is_within_block(trainer):
            # Only within a block do the models differ; elsewhere rank 0's is everyone's.
            rules = {("model", name): "mean" for name in trainer["update"]}
        return ReshardingPlan(trainer["num_models"], rules)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """End the block with the mean of the models; new ranks start from the global model."""
        return super().end_resharding(end_block(state))

    def _look_for_faults(self) -> None:
        """Look for NaNs where the model lies, as of now."""
        self._fault = FirstFault(self.parameters.device)
        self._finite = FiniteCheck(self.group, self.parameters.device)

    def _start_counting(self) -> None:
        self._fault.clear()
        self.num_steps_in_block = 0

    def _synchronize_optimizer(self) -> None:
        # The papers leave open what the optimizer's momenta become at a block's end.
        parameters = self.parameters.named.values()
        if self.optimizer_state == "reset":
            for parameter in parameters:
                self.optimizer.state.pop(parameter, None)
        elif self.optimizer_state == "average":
            average_moments(self.optimizer, parameters, self.average)


def check_block_size(block_size: int) -> None:
    """Raise ValueError for a block without steps."""
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}: need at least 1 step")


@dataclass(frozen=True, slots=True, kw_only=True)
class BmufConfig(BlockConfig):
    """BMUF: the models of all ranks are averaged after every block of steps, and filtered."""

    name: Literal["bmuf"] = "bmuf"

    num_state_vectors: ClassVar[int] = 3
    """Both models of a block, and the filtered update."""

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks give a block momentum below 0."""
        del ranks_per_host
        self.check_models(num_ranks)

    def make_trainer(self, model: nn.Module, optimizer: Optimizer, group: ProcessGroup) -> Bmuf:
        """Wrap model and optimizer; all ranks of `group` must call this together."""
        return Bmuf(
            model,
            optimizer,
            group=group,
            block_size=self.block_size,
            block_learning_rate=self.block_learning_rate,
            block_momentum=self.block_momentum,
            momentum_constant=self.momentum_constant,
            form=self.form,
            optimizer_state=self.optimizer_state,
        )
