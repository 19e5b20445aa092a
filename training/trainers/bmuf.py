"""Train alone for a block of steps, then average and filter the models (BMUF; 003 VI-B).

SparseLoCo (arXiv 2508.15706, algorithm 1) is BMUF without block momentum, of which ranks send only
the largest changes.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms.block_filter import BlockFilter, BlockState
from training.distributed import collectives
from training.distributed.checks import FiniteCheck, FirstFault
from training.settings.trainers import (
    BlockConfig,
    BmufConfig,
    HtmConfig,
    SparseLocoConfig,
    num_groups,
)
from training.trainers.block_exchange import (
    BlockExchange,
    Mean,
    Tiers,
    ranks_per_host,
    residual_rules,
)
from training.trainers.parameters import FlatParameters
from training.trainers.replica import treat_moments
from training.trainers.trainer import (
    ReshardingPlan,
    State,
    Statistics,
    Trainer,
    norm_of,
)


class Bmuf(Trainer):
    """Bmuf averages the ranks' models every `block_size` steps, and filters the average.

    `block_momentum` None follows from zeta / (N (1 - eta)) = C, with `momentum_constant` C.
    `optimizer_state` says what becomes of the optimizer's momenta at a block's end, and
    `block_exchange` how ranks send what a block changed. Of each `ranks_per_leader` ranks (0: of a
    host's) one leader sends the mean of their models, so that fewer bytes cross a slow link.
    """

    record: ClassVar[type[BmufConfig | HtmConfig | SparseLocoConfig]] = BmufConfig
    config: BmufConfig | HtmConfig | SparseLocoConfig
    tier_setting: ClassVar = "ranks_per_leader"
    """The setting that counts the ranks of the lower tier."""

    def set_up(self) -> None:
        """Count the models, and begin without a block."""
        super().set_up()
        group, name = self.group, self.tier_setting
        size = getattr(self.config, name) or ranks_per_host(group, self.parameters.device)
        known: dict[str, Any] = {name: size}  # what the host's ranks are is resolved once
        self.config = replace(self.config, **known)
        self.ranks_per_leader: int = size
        self._num_leaders = num_groups(group.size(), size, name)
        self._tiers: Tiers | None = None
        blocks = self.blocks
        # Eq. (5) of 000 sets eta; with zeta = C = 1 it is 1 - 1/N.
        block_momentum = blocks.block_momentum_of(self.num_models)
        self.filter = BlockFilter(blocks.block_learning_rate, block_momentum, blocks.form)
        self._models = BlockModels(self.filter)
        self._exchange = BlockExchange(blocks.block_exchange, self.parameters)
        self.num_steps_in_block = 0
        self.num_blocks = 0

    @property
    def blocks(self) -> BlockConfig:
        """Return the settings of the blocks."""
        assert isinstance(self.config, BlockConfig)
        return self.config

    @property
    def num_models(self) -> int:
        """Count the different models that a block's end averages, N of the equations."""
        return self.group.size()

    def groups(self) -> set[ProcessGroup]:
        """Return the whole group and those of the two tiers."""
        return {self.group} | (self._tiers.groups() if self._tiers is not None else set())

    def connect(self) -> None:
        """Make the two tiers of groups, once."""
        if self._tiers is None:
            device = self.parameters.device
            self._tiers = Tiers.of(self.group, self.ranks_per_leader, device)

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        return super().settings() | {"num_steps_in_block": self.num_steps_in_block}

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return the global model and the update; the parameters differ within a block."""
        return {**self._models.views("global_model", self.parameters), **self.shared_state()}

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the filtered update, from which the next block begins."""
        return self._models.views("update", self.parameters)

    def is_comparison_due(self) -> bool:
        """Return whether ranks compare their replicas after this step: at blocks' ends alone."""
        return self.num_steps_in_block + 1 >= self.config.block_size and super().is_comparison_due()

    def carry_over(self, old: FlatParameters) -> None:
        """Keep the update of tensors that are still trained; new ones begin with an update of 0."""
        self._models.carry_over(old, self.parameters)
        self._exchange.carry_over(old, self.parameters)
        self.forget_faults()

    def forget_faults(self) -> None:
        """Look for NaNs from now on, where the model now lies."""
        self._fault = FirstFault(self.parameters.device)
        self._finite = FiniteCheck(self.group, self.parameters.device)

    def exchange_gradients(self) -> None:
        """Exchange nothing: within a block each rank applies its own gradients."""
        self._finite.check()
        self._fault.note(self.num_steps + 1, self.parameters.present_gradients())
        # Intra-block parallel optimization is local SGD, without any synchronization (003 VI-B).
        self.parameters.fill_missing_gradients()

    def average(self, values: Tensor, mean: Mean = collectives.all_reduce_mean) -> None:
        """Replace `values` by their `mean` over the leaders, each with its ranks' exact mean."""
        assert self._tiers is not None
        if self._tiers.lower is not None:
            collectives.all_reduce_mean(values, self._tiers.lower)
        self._tiers.average(values, mean)

    def begin(self) -> None:
        """Start a block from the shared model and the update that an earlier stage left."""
        self._take_over_residuals()
        self._models.begin(self.parameters)
        self._start_counting()

    def _take_over_residuals(self) -> None:
        """Bring the residuals that resharding left on any ranks to where they are sent from."""
        assert self._tiers is not None
        if self._num_leaders == 1:
            self._exchange.take_up_residual(self.parameters, self._tiers.lower)
        elif self._tiers.lower is not None:
            self._exchange.gather_residuals(self._tiers.lower)

    def end_step(self) -> None:
        """Count the step; at the block's end, synchronize."""
        self.num_steps_in_block += 1
        if self.num_steps_in_block >= self.config.block_size:
            self.synchronize()

    def synchronize(self) -> None:
        """Average the models, filter, and start the next block from the result."""
        # Eq. (1) of 000 averages N models of however few frames, which have moved them as much
        # less. Weights would count frames twice: 7 to 14 % more loss where ranks' classes differ.
        mean_model = self._mean_model()
        self._finite.examine(self.num_steps, [mean_model], lambda: self._fault.step)
        # The papers leave open what the optimizer's momenta become at a block's end.
        parameters = self.parameters.named.values()
        treat_moments(self.blocks.optimizer_state, self.optimizer, parameters, self.average)
        self._models.end_block(mean_model, self.parameters)
        self._start_counting()
        self.num_blocks += 1

    def _mean_model(self) -> Tensor:
        model = self.parameters.weights()
        # One leader sends to no other, so nothing is compressed, and nothing stays behind.
        if self._exchange.code is None or self._num_leaders == 1:
            self.average(model)
            return model
        # A model has few changes in a block, but no small elements: what is sent is the change.
        change = model.sub_(self._models.state.broadcast_model)
        self.average(change, self._exchange.mean)
        return change.add_(self._models.state.broadcast_model)

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

    def statistics(self) -> Statistics:
        """Add the blocks and two Euclidean norms.

        `block_update_norm` is that of the last block's filtered update Delta(t) of 000 eq. (3),
        `block_residual_norm` that of the changes that this rank's messages have not sent yet.
        """
        return super().statistics() | {
            "num_blocks": self.num_blocks,
            "block_update_norm": self._models.update_norm(),
            "block_residual_norm": self._exchange.residual_norm(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Add the place in the block, both models, the filtered update and its filter.

        Raises FloatingPointError where a gradient of this rank was not finite in this block.
        """
        self._finite.check()
        self._fault.check(self.group.rank())
        block = {
            "num_steps_in_block": self.num_steps_in_block,
            "num_models": self.num_models,
            "block_filter": asdict(self.filter),
            "optimizer_state": self.blocks.optimizer_state,
        }
        state = super().state_dict() | block | self._models.state_dict(self.parameters)
        return state | self._exchange.state_dict(self.parameters)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError for other settings, and in a block of other models.

        Another block size is taken over where the block is not too long for it already.
        """
        super().load_state_dict(state)
        self._exchange.load_state_dict(state, self.parameters)
        self._models.load_state_dict(state, self.parameters)
        self.num_steps_in_block = state["num_steps_in_block"]

    def check_settings(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError also within a block that cannot be ended as it began."""
        check_block(state, self.config.block_size, self.num_models)
        super().check_settings(state)

    def replaceable_settings(self, state: Mapping[str, Any]) -> Collection[str]:
        """Name the block's size, and outside of blocks the ranks of the lower tier."""
        # There all ranks start from one model, and entering gives leaders the residuals.
        return ("block_size",) if state["is_open"] else ("block_size", self.tier_setting)

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the models' trained parameters within a block, where they differ."""
        trainer = state["trainer"]
        rules = residual_rules(trainer)
        if is_within_block(trainer):
            # Only within a block do the models differ; elsewhere rank 0's is everyone's.
            rules |= {("model", name): "mean" for name in trainer["update"]}
        return ReshardingPlan(trainer["num_models"], rules)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """End the block with the mean of the models; new ranks start from the global model."""
        return super().end_resharding(end_block(state))

    def _start_counting(self) -> None:
        self._fault.clear()
        self.num_steps_in_block = 0


class SparseLoco(Bmuf):
    """SparseLoco moves the model by the mean of what ranks send of their changes; see `TopK`.

    It is BMUF without block momentum: error feedback takes its place. Each rank keeps its
    optimizer's moments.
    """

    record = SparseLocoConfig
    config: SparseLocoConfig

    @property
    def blocks(self) -> BlockConfig:
        """Return the settings of BMUF's blocks that are these."""
        return self.config.as_bmuf()


BLOCK_VECTORS = tuple(each.name for each in fields(BlockState))
"""The vectors of a block's state, by the names that a checkpoint gives them."""


class BlockModels:
    """BlockModels holds both models of a block and the filtered update of the last one.

    They are vectors of the trained parameters; before the first block there are none.
    """

    def __init__(self, block_filter: BlockFilter) -> None:
        self.filter = block_filter
        self._state: BlockState | None = None

    @property
    def state(self) -> BlockState:
        """Return the vectors; there is a block."""
        assert self._state is not None
        return self._state

    def drop(self) -> None:
        """Forget them: one model needs none."""
        self._state = None

    def carry_over(self, old: FlatParameters, new: FlatParameters) -> None:
        """Keep the update of tensors that are still trained; new ones begin with an update of 0."""
        if self._state is not None:
            model = new.carry_over(self._state.global_model, old)
            update = new.carry_over(self._state.update, old)
            # `begin` takes the weights from what rank 0 has.
            self._state = self.filter.begin(model, update)

    def begin(self, parameters: FlatParameters) -> None:
        """Start a block from the shared model and the update that an earlier stage left."""
        if self._state is None:
            self._start(self.filter.begin(parameters.weights()), parameters)
            return
        # Leaving rounded a float32 global model to bfloat16 parameters: this W is still theirs.
        model = parameters.refined(self._state.global_model)
        # Without Delta(t-1) the first block of each stage would move without block momentum.
        self._start(self.filter.begin(model, self._state.update), parameters)

    def end_block(self, mean_model: Float[Tensor, " elements"], parameters: FlatParameters) -> None:
        """Filter the mean of the models, and start the next block from the result."""
        # Eqs. (2) to (4) run on every rank alike, so the new global model needs no broadcast.
        self._start(self.filter.end_block(self.state, mean_model), parameters)

    def first_difference(self, parameters: FlatParameters) -> str:
        """Return the name of the first parameter that is not as the block began, or nothing."""
        if self._state is None:
            return ""
        return parameters.first_difference(self._state.broadcast_model)

    def views(self, part: str, parameters: FlatParameters) -> Mapping[str, Tensor]:
        """Return one of `BLOCK_VECTORS` by the parameters' names, without copying."""
        views = parameters.views(getattr(self._state, part)) if self._state else {}
        return {f"{part} of parameter {name}": view for name, view in views.items()}

    def update_norm(self) -> float:
        """Return the norm of the last block's filtered update; waits for its device."""
        return norm_of(self._state.update) if self._state else 0.0

    def state_dict(self, parameters: FlatParameters) -> dict[str, Any]:
        """Copy the vectors, by parameter."""
        if self._state is None:
            return {}
        return {part: parameters.by_name(getattr(self._state, part)) for part in BLOCK_VECTORS}

    def load_state_dict(self, state: Mapping[str, Any], parameters: FlatParameters) -> None:
        """Restore `state_dict()`."""
        self._state = None
        if "update" in state:
            vectors = (parameters.flatten(state[part]) for part in BLOCK_VECTORS)
            self._state = BlockState(*vectors)

    def _start(self, state: BlockState, parameters: FlatParameters) -> None:
        # A block's gradient is what the ranks change, so it is measured from the model as they
        # hold it: measured from W + eta Delta, rounding to bfloat16 would count as training.
        broadcast_model = parameters.rounded(state.broadcast_model)
        self._state = replace(state, broadcast_model=broadcast_model)
        parameters.set_weights(broadcast_model)


def check_block(state: Mapping[str, Any], block_size: int, num_models: int) -> None:
    """Raise ValueError where BMUF's state is within a block that cannot be ended as it began."""
    # Within a block the N models differ, and eta belongs to this N by eq. (5).
    if state["is_open"] and state["num_models"] != num_models:
        raise ValueError(
            f"the checkpoint is within a block of {state['num_models']} models, now there are "
            f"{num_models}: end the block by training.checkpoints.training_state"
        )
    if state["is_open"] and state["num_steps_in_block"] >= block_size:
        raise ValueError(
            f"block_size = {block_size}: the checkpoint is {state['num_steps_in_block']} steps "
            f"into a block of {state['settings']['block_size']}: need a block_size above "
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
