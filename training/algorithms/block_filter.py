"""Filter the block updates of averaged models (BMUF; paper 003 VI-B, 000 2.2)."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infra.configuration import LATER
from infra.ranges import Range, check_ranges
from training.algorithms.block_codes import EXACT, BlockCode

Form = Literal["nesterov", "as_printed"]
OptimizerState = Literal["keep", "average", "reset"]
"""Treatments of the optimizer's moments at a block's end."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """BlockConfig: zeta, and C of eq. (5); the defaults are those of paper 000 3.2.

    A `block_momentum` takes the place of eq. (5) and its C; 0 is model averaging.
    """

    block_size: Annotated[int, Range(1, 1_000_000)] = 50
    block_learning_rate: Annotated[float, Range(1e-6, 1000)] = 1.0
    momentum_constant: Annotated[float, Range(1e-6, 1000)] = 1.0
    block_momentum: Annotated[float, Range(0, 1, below=True)] | None = field(
        default=None, metadata=LATER
    )
    form: Form = field(default="nesterov", metadata=LATER)
    optimizer_state: OptimizerState = field(default="keep", metadata=LATER)
    block_exchange: BlockCode = field(default=EXACT, metadata=LATER)

    __post_init__ = check_ranges

    @property
    def num_block_vectors(self) -> int:
        """Count both models of a block, the filtered update, and a code's residual."""
        return 3 + self.block_exchange.has_residual

    def block_settings(self) -> dict[str, Any]:
        """Return these fields, which BMUF and HTM take by their names."""
        return {each.name: getattr(self, each.name) for each in fields(BlockConfig)}

    def check_models(self, num_models: int) -> None:
        """Raise ValueError if eq. (5) gives so many models a block momentum below 0."""
        if self.block_momentum is None:
            block_momentum_for(num_models, self.block_learning_rate, self.momentum_constant)
