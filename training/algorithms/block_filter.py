"""Filter the block updates of averaged models (BMUF; paper 003 VI-B, 000 2.2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from training.settings.trainers import Form, block_response


@dataclass(frozen=True, slots=True)
class BlockState:
    """BlockState is the filter's state between two blocks, each part one vector of parameters.

    `global_model` is W_g, the model to evaluate. Ranks start a block from `broadcast_model`, as
    their parameters round it. `update` is Delta, the filtered update of the last block.
    """

    global_model: Float[Tensor, " elements"]
    broadcast_model: Float[Tensor, " elements"]
    update: Float[Tensor, " elements"]


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """BlockFilter computes eqs. (2) to (4) of paper 000, with constant eta and zeta.

    `nesterov`: W_g += Delta, ranks start from W_g + eta Delta, W_g is evaluated. `as_printed`:
    eq. (4) to the letter starts from and evaluates the same model. It therefore equals classical
    block momentum with zeta multiplied by 1 + eta.
    """

    block_learning_rate: float
    block_momentum: float
    form: Form

    @property
    def response(self) -> float:
        """Return how far a block gradient moves the model in all."""
        return block_response(self.block_learning_rate, self.block_momentum, self.form)

    def begin(
        self, model: Float[Tensor, " elements"], update: Float[Tensor, " elements"] | None = None
    ) -> BlockState:
        """Return the state before the first block; `update` is Delta of an earlier training."""
        if update is None:
            update = torch.zeros_like(model)
        if self.form == "as_printed":
            return BlockState(model, model, update)
        # The first block looks ahead too, so leaving and entering at a block's end changes no bit.
        return BlockState(model, model + self.block_momentum * update, update)

    def end_block(self, state: BlockState, mean_model: Float[Tensor, " elements"]) -> BlockState:
        """Return the state after a block from the mean of the models, eq. (1)."""
        # Eq. (2): the block gradient G(t). Ranks started from the broadcast model, not from W_g.
        block_gradient = mean_model - state.broadcast_model
        # Eq. (3): the filtered update Delta(t).
        update = self.block_momentum * state.update + self.block_learning_rate * block_gradient
        if self.block_momentum == 0 and self.block_learning_rate == 1:
            # Model averaging: W + (mean - W) is not the mean in floats. W keeps what the broadcast
            # model lost to rounding; where it lost nothing, this subtracts +0 and changes no bit.
            mean_model = mean_model - (state.broadcast_model - state.global_model)
            return BlockState(mean_model, mean_model, update)
        # Eq. (4): W_g + Delta, and eta Delta more, which is Nesterov's step.
        global_model = state.global_model + update
        nesterov_model = global_model + self.block_momentum * update
        if self.form == "as_printed":
            return BlockState(nesterov_model, nesterov_model, update)
        return BlockState(global_model, nesterov_model, update)
