"""Blockwise model-update filtering of averaged models (paper 003 VI-B, 000 2.2)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Form = Literal["nesterov", "as_printed"]


def block_momentum_for(
    num_models: int, block_learning_rate: float, momentum_constant: float
) -> float:
    """Compute eta from zeta / (N (1 - eta)) = C (000 eq. 5); N is the number of averaged models."""
    if not (momentum_constant > 0 and momentum_constant * num_models >= block_learning_rate):
        raise ValueError(
            f"momentum_constant = {momentum_constant}: need at least block_learning_rate / N = "
            f"{block_learning_rate} / {num_models}, or the block momentum is negative"
        )
    return 1 - block_learning_rate / (num_models * momentum_constant)


@dataclass(frozen=True, slots=True)
class BlockState:
    """What lasts from block to block; each a model's parameters as one vector.

    `global_model` is the model to evaluate, `broadcast_model` the one that ranks start a block
    from, `update` the filtered update Delta.
    """

    global_model: Float[Tensor, " elements"]
    broadcast_model: Float[Tensor, " elements"]
    update: Float[Tensor, " elements"]


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Eqs. (2) to (4) of paper 000, with constant eta and zeta.

    `nesterov`: W += Delta, ranks start from W + eta Delta, W is evaluated. `as_printed`: eq. (4)
    to the letter, which starts from and evaluates one model and so equals classical block momentum
    with zeta multiplied by 1 + eta.
    """

    block_learning_rate: float
    block_momentum: float
    form: Form

    def __post_init__(self) -> None:
        if not self.block_learning_rate > 0:
            raise ValueError(f"block_learning_rate = {self.block_learning_rate}: need above 0")
        if not 0 <= self.block_momentum < 1:
            raise ValueError(f"block_momentum = {self.block_momentum}: need 0 <= eta < 1")
        if self.form not in ("nesterov", "as_printed"):
            raise ValueError(f"form = {self.form!r}: need 'nesterov' or 'as_printed'")

    def begin(
        self, model: Float[Tensor, " elements"], update: Float[Tensor, " elements"] | None = None
    ) -> BlockState:
        """Start from `model`, with the update that an earlier stage of training left, if any."""
        if update is None:
            update = torch.zeros_like(model)
        if self.form == "as_printed":
            return BlockState(model, model, update)
        return BlockState(model, model + self.block_momentum * update, update)

    def end_block(self, state: BlockState, mean_model: Float[Tensor, " elements"]) -> BlockState:
        """Filter the mean of the models at a block's end; the arguments stay as they are."""
        block_gradient = mean_model - state.broadcast_model
        update = self.block_momentum * state.update + self.block_learning_rate * block_gradient
        if self.block_momentum == 0 and self.block_learning_rate == 1:
            # Model averaging: W + (mean - W) is not the mean in floats.
            return BlockState(mean_model, mean_model, update)
        global_model = state.global_model + update
        look_ahead = global_model + self.block_momentum * update
        if self.form == "as_printed":
            return BlockState(look_ahead, look_ahead, update)
        return BlockState(global_model, look_ahead, update)
