"""Synchronous SGD with gradient threshold compression (paper 003 VI-A, 000 2.1)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training import collectives
from training.algorithms.gradient_threshold import (
    add_message,
    check_gradient_threshold,
    is_finite,
    not_finite_message,
    take_message,
)
from training.trainers.trainer import Trainer


class ThresholdedSum:
    """The sum of what ranks send of their gradients; the rest stays here, in the residual.

    With gradient_threshold 0 the sum is that of the gradients, unquantized, and nothing stays.
    """

    def __init__(self, residual: Float[Tensor, " elements"], gradient_threshold: float) -> None:
        check_gradient_threshold(gradient_threshold, len(residual))
        self.residual = residual
        self.gradient_threshold = gradient_threshold

    def of(
        self, gradients: Float[Tensor, " elements"], group: ProcessGroup
    ) -> Float[Tensor, " elements"]:
        """Exchange one step's gradients, which may be overwritten.

        Raises FloatingPointError, on all ranks, where one rank's gradient is not finite: the
        residual would keep a NaN for ever, unseen.
        """
        if self.gradient_threshold == 0:
            collectives.add(gradients, group)
            return gradients
        messages = collectives.gather(self._message(gradients), group, "gradients")
        broken = [rank for rank, message in enumerate(messages) if not is_finite(message)]
        if broken:
            raise FloatingPointError(
                f"the gradient of rank {broken[0]} holds a NaN or an infinity: look at that rank's "
                "data, or lower the learning rate"
            )
        counts = torch.zeros_like(gradients, dtype=torch.int32)
        for message in messages:
            add_message(counts, message)
        return counts.to(gradients.dtype).mul_(self.gradient_threshold)

    def _message(self, gradients: Float[Tensor, " elements"]) -> Tensor:
        if not torch.isfinite(gradients.sum()):
            return not_finite_message(gradients.device)
        self.residual += gradients
        return take_message(self.residual, self.gradient_threshold)


class Gtc(Trainer):
    """Each rank sends +-`gradient_threshold` for the elements whose residual has reached it.

    The papers' 8 is for gradients summed over a 2048-frame minibatch: for a loss divided by 2048 it
    is 8 / 2048.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: ProcessGroup,
        gradient_threshold: float,
    ) -> None:
        super().__init__(model, optimizer, group=group)
        self._sum = ThresholdedSum(self.parameters.zeros(), gradient_threshold)

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        return super().settings() | {"gradient_threshold": self._sum.gradient_threshold}

    def exchange_gradients(self) -> None:
        """Replace each gradient by the sum of what all ranks sent, this one included."""
        self.parameters.set_gradients(self._sum.of(self.parameters.gradients(), self.group))

    def state_dict(self) -> dict[str, Any]:
        """Add the residuals, by parameter."""
        return super().state_dict() | {"residuals": self.parameters.by_name(self._sum.residual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self._sum.residual = self.parameters.flatten(state["residuals"])
        super().load_state_dict(state)
