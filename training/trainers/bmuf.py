"""Train alone for a block of steps, then average and filter the models (BMUF; 003 VI-B).

What blocks changed is averaged between all ranks, or between the leaders of small groups (the upper
of two tiers), exactly or by top-k, which keeps what it does not send for later. SparseLoCo (arXiv
2508.15706, algorithm 1) is BMUF by top-k without block momentum.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms import top_k
from training.algorithms.block_filter import BlockFilter, BlockState
from training.distributed import collectives
from training.distributed.collectives import gather_equal, gather_host_names
from training.distributed.process_group import subgroup_of, world_ranks
from training.settings.trainers import (
    BlockConfig,
    BmufConfig,
    HtmConfig,
    SparseLocoConfig,
    num_groups,
)
from training.trainers.parameters import FlatParameters
from training.trainers.replica import treat_moments
from training.trainers.trainer import (
    EntryPath,
    ReshardingPlan,
    Rule,
    State,
    Statistics,
    Trainer,
    norm_of,
)

BLOCK_VECTORS = tuple(each.name for each in fields(BlockState))
"""The vectors of a block's state, by the names that a checkpoint gives them."""

RESIDUALS = "block_residuals"

Mean: TypeAlias = Callable[[Tensor, ProcessGroup], None]
"""Replace values by their mean over a group's ranks, bitwise the same on each."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Tiers: groups of `group_size` ranks, and above them their leaders, the first of each group.

    `lower` is this rank's group, None where it is alone in it; `upper` joins the leaders, and is
    None on all other ranks.
    """

    lower: ProcessGroup | None
    upper: ProcessGroup | None

    @classmethod
    def of(cls, group: ProcessGroup, group_size: int, device: torch.device) -> "Tiers":
        """Divide `group` into groups of consecutive ranks; all ranks must call this together.

        Raises ValueError where there are two tiers to make and `group` is not the whole world.
        """
        if group_size == 1:
            return cls(None, group)
        if group_size == group.size():
            return cls(group, None)
        ranks = world_ranks(group)
        parts = [ranks[first : first + group_size] for first in range(0, len(ranks), group_size)]
        subgroups = [subgroup_of(group, part, device) for part in parts]
        upper = subgroup_of(group, ranks[::group_size], device)
        return cls(subgroups[group.rank() // group_size], upper)

    def groups(self) -> set[ProcessGroup]:
        """Return those of this rank."""
        return {group for group in (self.lower, self.upper) if group is not None}

    def average(
        self, values: Float[Tensor, "..."], mean: Mean = collectives.all_reduce_mean
    ) -> None:
        """Replace `values`, the same within a lower group, by their `mean` over the groups."""
        if self.upper is not None:
            # One leader a host crosses the link: 20 MB to a target loss, BMUF's ring 42.
            mean(values, self.upper)
        if self.lower is not None:
            collectives.broadcast(values, self.lower)


def ranks_per_host(group: ProcessGroup, device: torch.device) -> int:
    """Return the number of ranks of each host; all ranks must call this together.

    Raises ValueError where hosts have different numbers of ranks, or ranks that do not follow each
    other: they cannot be the groups of two tiers.
    """
    hosts = gather_host_names(group, device)
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    if len({host for host, _ in runs}) < len(runs) or len({count for _, count in runs}) > 1:
        raise ValueError(
            f"ranks by host: {runs}: need equally many on each host, one host after the other; "
            "start them so, or give group_size"
        )
    return runs[0][1]


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
        self._models: BlockState | None = None  # before the first block, or where one needs none
        self._top_k = blocks.block_exchange
        # What messages left out. A message holds this model's share of the mean, change / N, so
        # residuals add up to what the global model still lacks, and a sum over other numbers of
        # models is the same. Of a lower tier's ranks the leader alone has one other than zeros.
        self._residual = self.parameters.zeros() if self._top_k else None
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
        return {**self._views("global_model"), **self.shared_state()}

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the filtered update, from which the next block begins."""
        return self._views("update")

    def _views(self, part: str) -> Mapping[str, Tensor]:
        """Return one of `BLOCK_VECTORS` by the parameters' names, without copying."""
        views = self.parameters.views(getattr(self._models, part)) if self._models else {}
        return {f"{part} of parameter {name}": view for name, view in views.items()}

    def is_comparison_due(self) -> bool:
        """Return whether ranks compare their replicas after this step: at blocks' ends alone."""
        return self.num_steps_in_block + 1 >= self.config.block_size and super().is_comparison_due()

    def carry_over(self, old: FlatParameters) -> None:
        """Keep update and residual of tensors that are still trained; new ones begin with zeros."""
        if self._models is not None:
            model = self.parameters.carry_over(self._models.global_model, old)
            update = self.parameters.carry_over(self._models.update, old)
            # `begin` takes the weights from what rank 0 has.
            self._models = self.filter.begin(model, update)
        if self._residual is not None:
            self._residual = self.parameters.carry_over(self._residual, old)
        self.forget_faults()

    def exchange_gradients(self) -> None:
        """Exchange nothing: within a block each rank applies its own gradients."""
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
        if self._models is None:
            self._start_block(self.filter.begin(self.parameters.weights()))
            return
        # Leaving rounded a float32 global model to bfloat16 parameters: this W is still theirs.
        model = self.parameters.refined(self._models.global_model)
        # Without Delta(t-1) the first block of each stage would move without block momentum.
        self._start_block(self.filter.begin(model, self._models.update))

    def _start_block(self, models: BlockState) -> None:
        # A block's gradient is what the ranks change, so it is measured from the model as they
        # hold it: measured from W + eta Delta, rounding to bfloat16 would count as training.
        broadcast_model = self.parameters.rounded(models.broadcast_model)
        self._models = replace(models, broadcast_model=broadcast_model)
        self.parameters.set_weights(broadcast_model)
        self._fault.clear()
        self.num_steps_in_block = 0

    def _take_over_residuals(self) -> None:
        """Bring the residuals that resharding left on any ranks to where they are sent from.

        One leader alone sends nothing: what more leaders had not sent moves the model at once, as
        far as it would have in all.
        """
        assert self._tiers is not None
        if self._residual is None:
            return
        lower = self._tiers.lower
        if lower is not None:
            collectives.all_reduce_sum(self._residual, lower)
        if self._num_leaders > 1:
            if lower is not None and lower.rank() > 0:
                self._residual.zero_()
        elif self._residual.any():
            moved = self.filter.response * self._residual
            self.parameters.set_weights(self.parameters.weights() + moved)
            self._residual.zero_()

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
        assert self._models is not None
        # Eqs. (2) to (4) run on every rank alike, so the new global model needs no broadcast.
        self._start_block(self.filter.end_block(self._models, mean_model))
        self.num_blocks += 1

    def _mean_model(self) -> Float[Tensor, " elements"]:
        model = self.parameters.weights()
        # One leader sends to no other, so nothing is compressed, and nothing stays behind.
        if self._top_k is None or self._num_leaders == 1:
            self.average(model)
            return model
        assert self._models is not None
        # A model has few changes in a block, but no small elements: what is sent is the change.
        change = model.sub_(self._models.broadcast_model)
        self.average(change, self._top_k_mean)
        return change.add_(self._models.broadcast_model)

    def _top_k_mean(self, change: Float[Tensor, " elements"], group: ProcessGroup) -> None:
        """Replace `change` by the mean of what ranks sent; one that is not finite reaches all."""
        assert self._top_k is not None
        assert self._residual is not None
        message = top_k.take_message(self._residual, change / group.size(), self._top_k)
        change.zero_()
        # In rank order on each rank, so that all have the same bits.
        for each in gather_equal(message, group, "block changes"):
            top_k.add_message(change, each, self._top_k)

    def find_undone(self) -> str:
        """Return the error of a change since the block's end: leaving would replace it by W."""
        self._finite.check()
        if not self._is_open or self.num_steps_in_block > 0 or self._models is None:
            return ""
        if not (name := self.parameters.first_difference(self._models.broadcast_model)):
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
        assert self._models is not None
        self.parameters.set_weights(self._models.global_model)

    def set_evaluated(self) -> None:
        """Set the parameters to the global model, with what a partial block has changed."""
        assert self._models is not None
        models = self._models
        if self.num_steps_in_block > 0:
            mean_model = self.parameters.weights()
            self.average(mean_model)
            models = self.filter.end_block(models, mean_model)
        self.parameters.set_weights(models.global_model)

    def statistics(self) -> Statistics:
        """Add the blocks and two Euclidean norms.

        `block_update_norm` is that of the last block's filtered update Delta(t) of 000 eq. (3),
        `block_residual_norm` that of the changes that this rank's messages have not sent yet.
        """
        return super().statistics() | {
            "num_blocks": self.num_blocks,
            "block_update_norm": norm_of(self._models.update) if self._models else 0.0,
            "block_residual_norm": 0.0 if self._residual is None else norm_of(self._residual),
        }

    def state_dict(self) -> dict[str, Any]:
        """Add the place in the block, both models, the filtered update and its filter.

        Raises FloatingPointError where a gradient of this rank was not finite in this block.
        """
        self._finite.check()
        self._fault.check(self.group.rank())
        block = {
            "num_steps_in_block": self.num_steps_in_block,
            "num_blocks": self.num_blocks,
            "num_models": self.num_models,
            "block_filter": asdict(self.filter),
            "optimizer_state": self.blocks.optimizer_state,
        }
        vectors = {part: getattr(self._models, part) for part in BLOCK_VECTORS if self._models}
        if self._residual is not None:
            vectors[RESIDUALS] = self._residual
        copied = {name: self.parameters.by_name(vector) for name, vector in vectors.items()}
        return super().state_dict() | block | copied

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError for other settings, and in a block of other models.

        Another block size is taken over where the block is not too long for it already.
        """
        super().load_state_dict(state)
        if self._residual is not None:
            self._residual = self.parameters.flatten(state[RESIDUALS])
        self._models = None
        if "update" in state:
            vectors = (self.parameters.flatten(state[part]) for part in BLOCK_VECTORS)
            self._models = BlockState(*vectors)
        self.num_steps_in_block = state["num_steps_in_block"]
        self.num_blocks = state["num_blocks"]

    def check_settings(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError also within a block that cannot be ended as it began."""
        # Within a block the N models differ, and eta belongs to this N by eq. (5).
        if state["is_open"] and state["num_models"] != self.num_models:
            raise ValueError(
                f"the checkpoint is within a block of {state['num_models']} models, now there are "
                f"{self.num_models}: end the block by training.checkpoints.training_state"
            )
        size, num_steps = self.config.block_size, state["num_steps_in_block"]
        if state["is_open"] and num_steps >= size:
            raise ValueError(
                f"block_size = {size}: the checkpoint is {num_steps} steps into a block of "
                f"{state['settings']['block_size']}: need a block_size above {num_steps}, or a "
                "checkpoint of a block's end"
            )
        super().check_settings(state)

    def replaceable_settings(self, state: Mapping[str, Any]) -> Collection[str]:
        """Name the block's size, and outside of blocks the ranks of the lower tier."""
        # There all ranks start from one model, and entering gives leaders the residuals.
        return ("block_size",) if state["is_open"] else ("block_size", self.tier_setting)

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the models' trained parameters within a block, where they differ."""
        trainer = state["trainer"]
        rules: dict[EntryPath, Rule] = (
            {("trainer", RESIDUALS): "sum"} if RESIDUALS in trainer else {}
        )
        if is_within_block(trainer):
            # Only within a block do the models differ; elsewhere rank 0's is everyone's.
            rules |= {("model", name): "mean" for name in trainer["update"]}
        return ReshardingPlan(trainer["num_models"], rules)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """End the block with the mean of the models; new ranks start from the global model."""
        trainer = state["trainer"]
        if not trainer["is_open"] or "update" not in trainer:
            return super().end_resharding(state)
        ended = state
        if is_within_block(trainer):
            ended = {**state, "trainer": trainer | _ended_block(trainer, state["model"])}
            if trainer["optimizer_state"] == "reset":
                ended["optimizer"] = {**state["optimizer"], "state": {}}
        # New ranks start from W, not from the look-ahead W + eta Delta.
        model = {**state["model"], **ended["trainer"]["global_model"]}
        return super().end_resharding({**ended, "model": model})


def is_within_block(trainer: Mapping[str, Any]) -> bool:
    """Return whether BMUF's state is within a block, where the models of ranks differ."""
    return bool(trainer["is_open"] and trainer["num_steps_in_block"] > 0)


def _ended_block(trainer: Mapping[str, Any], mean_model: Mapping[str, Tensor]) -> dict[str, Any]:
    """Filter the mean of the models, a parameter at a time (000 eqs. 2-4)."""
    block_filter = BlockFilter(**trainer["block_filter"])
    ended: dict[str, Any] = {part: {} for part in BLOCK_VECTORS}
    ended |= {"num_steps_in_block": 0, "num_blocks": trainer["num_blocks"] + 1}
    # The filter is elementwise, so parameters one by one give the bits of the whole vector.
    for name in trainer["update"]:
        mean = mean_model[name]
        before = BlockState(*(trainer[part][name].reshape(-1) for part in BLOCK_VECTORS))
        after = block_filter.end_block(before, mean.reshape(-1))
        for part in BLOCK_VECTORS:
            ended[part][name] = getattr(after, part).view(mean.shape)
    return ended


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
