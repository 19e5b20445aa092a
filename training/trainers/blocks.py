"""Keep BMUF's models from block to block, in checkpoints, and for another number of ranks."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from training.algorithms.block_filter import BlockFilter, BlockState
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import State
from training.trainers.statistics import norm_of

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
