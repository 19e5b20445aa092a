"""Synchronous SGD with gradient threshold compression (paper 003 VI-A, 000 2.1)."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.algorithms.gtc.gradient_threshold import check_gradient_threshold
from training.distributed import collectives
from training.distributed.finiteness import FiniteCheck, FirstFault
from training.trainers.messages import ExactMessages, FixedMessages, Messages
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import EntryPath, ReshardingPlan, Rule, State, check_settings
from training.trainers.statistics import GtcStatistics, density, norm_of
from training.trainers.trainer import Trainer

RESIDUAL_RULES: Mapping[EntryPath, Rule] = {("trainer", "residuals"): "sum"}
"""Resharding keeps the sum of the ranks' residuals, so that no gradient is lost."""


class ThresholdedSum:
    """ThresholdedSum adds what ranks send of their gradients; the rest stays in its residual.

    With gradient_threshold 0 the sum is that of the gradients, unquantized, and nothing stays.
    """

    def __init__(self, residual: Float[Tensor, " elements"], gradient_threshold: float) -> None:
        check_gradient_threshold(gradient_threshold, residual)
        self.residual = residual
        self.gradient_threshold = gradient_threshold
        # A GPU stalls where its host waits for a message's length, so there the length is fixed.
        self._messages: Messages = (
            FixedMessages(residual, gradient_threshold)
            if residual.is_cuda
            else ExactMessages(residual, gradient_threshold)
        )
        self._finite: FiniteCheck | None = None
        self._num_steps = 0
        self._num_elements = 0
        self._num_sent_before = 0

    def of(
        self, gradients: Float[Tensor, " elements"], group: ProcessGroup
    ) -> Float[Tensor, " elements"]:
        """Exchange one step's gradients, which are overwritten.

        Raises FloatingPointError, on all ranks, where one rank's gradient is not finite: the
        residual would hide a NaN for ever. On a GPU the next step raises it, or `check`.
        """
        # A tiny tau starves the model instead of becoming synchronous SGD, so 0 means unquantized.
        self._num_elements += len(gradients)
        if self.gradient_threshold == 0:
            return self._unquantized(gradients, group)
        counts = self._messages.sum_signs(self.residual, gradients, group)
        # Signs are summed as integers and meet tau once, so the order of ranks changes no bit.
        return gradients.copy_(counts).mul_(self.gradient_threshold)

    def _unquantized(
        self, gradients: Float[Tensor, " elements"], group: ProcessGroup
    ) -> Float[Tensor, " elements"]:
        self._finite = self._finite or FiniteCheck(group, gradients.device)
        self._finite.check()
        self._num_steps += 1
        fault = FirstFault(gradients.device)
        fault.note(self._num_steps, [gradients])
        collectives.all_reduce_sum(gradients, group)
        self._finite.examine(self._num_steps, [gradients], lambda: fault.step)
        return gradients

    def check(self) -> None:
        """Raise FloatingPointError, on all ranks, where the last step's gradients call for it."""
        self._messages.check()
        if self._finite is not None:
            self._finite.check()

    def statistics(self) -> dict[str, Any]:
        """Return what `GtcStatistics` says of the residual; waits for its device."""
        num_sent = self._num_sent()
        return {
            "num_elements": self._num_elements,
            "num_elements_sent": num_sent,
            "density": density(num_sent, self._num_elements),
            "residual_norm": norm_of(self.residual),
        }

    def _num_sent(self) -> int:
        if self.gradient_threshold == 0:
            return self._num_elements
        return self._num_sent_before + self._messages.num_sent

    def state(self) -> dict[str, int]:
        """Return what later sums depend on, besides the residual; raises as `check` does."""
        self.check()
        return self._messages.state()

    def restore(self, residual: Float[Tensor, " elements"], state: Mapping[str, Any]) -> None:
        """Resume from a residual and `state()`."""
        self.residual = residual
        self._finite = None
        self._num_steps = state.get("num_steps", 0)
        self._messages.restore(state)

    def carried_over(
        self, old: FlatParameters, new: FlatParameters, num_steps: int
    ) -> "ThresholdedSum":
        """Return a sum for the `new` parameters, which takes over the residual by their names."""
        residual = new.carry_over(self.residual, old)
        carried = ThresholdedSum(residual, self.gradient_threshold)
        carried.restore(residual, {"num_steps": num_steps})
        carried._num_elements = self._num_elements
        carried._num_sent_before = self._num_sent()
        return carried


class Gtc(Trainer):
    """Gtc sends +-`gradient_threshold` for the elements whose residual has reached it.

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

    def carry_over(self, old: FlatParameters) -> None:
        """Keep the residual of tensors that are still trained; that of frozen ones is dropped."""
        self._sum = self._sum.carried_over(old, self.parameters, self.num_steps)

    def exchange_gradients(self) -> None:
        """Replace each gradient by the sum of what all ranks sent, this one included."""
        # A rank applies its own +-tau: its raw gradient would count again through the residual.
        self.parameters.set_gradients(self._sum.of(self.parameters.gradients(), self.group))

    def conclude(self) -> None:
        """Leave the model as it is; raises what the last step's gradients call for."""
        self._sum.check()

    def state_dict(self) -> dict[str, Any]:
        """Add the residuals, by parameter, and on a GPU the messages' length and beginning."""
        residuals = self.parameters.by_name(self._sum.residual)
        settings = {"gradient_threshold": self._sum.gradient_threshold}
        return super().state_dict() | settings | {"residuals": residuals} | self._sum.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError where it is of another threshold."""
        super().load_state_dict(state)
        check_settings(state, {"gradient_threshold": self._sum.gradient_threshold})
        self._sum.restore(self.parameters.flatten(state["residuals"]), state)

    def statistics(self) -> GtcStatistics:
        """Return the steps, what was sent, and the norm of what waits in the residual."""
        return GtcStatistics(
            num_steps=self.num_steps, bytes_sent=self._traffic.num_bytes, **self._sum.statistics()
        )

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Add the residuals, which are sums over ranks."""
        del state
        return ReshardingPlan(rules=RESIDUAL_RULES)
