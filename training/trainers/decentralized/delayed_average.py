"""D1D-PSGD: an all-reduce of the models runs beside the gradient at the last mean (001 4)."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.distributed.pending_exchanges import PendingExchange, start_sum
from training.trainers.decentralized.own_models import OwnModels
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import ReshardingPlan, State


class D1dPsgd(OwnModels):
    """D1dPsgd computes W_{k+1} = W_k T_u - alpha_k g(W_{k-1} T_u): eq. (13), delayed by one.

    The parameters hold W_{k-1} T_u, the same on all ranks, while the all-reduce of W_k runs. So
    the mean of the models is SGD on all gradients, each one step late. Eq. (14) as printed takes
    the gradient at W_{k-1}, which is so for affine gradients alone.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, group: ProcessGroup) -> None:
        super().__init__(model, optimizer, group=group)
        self._own = self.parameters.weights()
        self._mean_before = self._own
        self._pending: PendingExchange | None = None

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return the parameters: between steps they hold the last mean, equal on all ranks."""
        return {f"parameter {name}": tensor for name, tensor in self.parameters.named.items()}

    def connect(self) -> None:
        """Start the sum again that a checkpoint has interrupted."""
        if self._is_open:
            self._start_sum()

    def begin(self) -> None:
        """Start from the shared model, W_0 and its mean in one."""
        self._own = self.parameters.weights()
        self._start_sum()

    def exchange_gradients(self) -> None:
        """Replace the model by the mean of all; each rank keeps its own gradient."""
        super().exchange_gradients()
        self._mean_before = self._mean()
        self._pending = None
        self.parameters.set_weights(self._mean_before)

    def end_step(self) -> None:
        """Start the sum of the new models; the next gradient is computed at the last mean."""
        self._own = self.parameters.weights()
        self._start_sum()
        self.parameters.set_weights(self._mean_before)

    def own_model(self) -> Float[Tensor, " elements"]:
        """Return this rank's column of W_k, not the mean that the parameters hold."""
        return self._own.clone()

    def conclude(self) -> None:
        """Leave the mean of the models, of which the sum is under way."""
        super().conclude()
        self._own, self._pending = self.parameters.weights(), None

    def carry_over(self, old: FlatParameters) -> None:
        """Forget a sum of other tensors."""
        super().carry_over(old)
        self._own, self._pending = self.parameters.weights(), None

    def state_dict(self) -> dict[str, Any]:
        """Add this rank's own model, of which the sum is under way."""
        return super().state_dict() | {"own_model": self.parameters.by_name(self._own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        super().load_state_dict(state)
        self._own = self.parameters.flatten(state["own_model"])

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the ranks' own models within the training."""
        return own_model_plan(state)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Begin from the mean of the models, as leaving would."""
        return super().end_resharding(with_own_model(state))

    def _start_total(self) -> PendingExchange:
        return super()._start_total() if self._pending is None else self._pending

    def _start_sum(self) -> None:
        self._pending = start_sum(self.own_model(), self.group, "models")

    def _mean(self) -> Float[Tensor, " elements"]:
        """Return W_k T_u, of which the sum is under way."""
        if self._pending is None:
            return super()._mean()
        # A pending sum may be asked for more than once.
        return self._pending.wait() / self.group.size()


def own_model_plan(state: State) -> ReshardingPlan:
    """Return the plan of a trainer whose state has this rank's own model beside the parameters."""
    trainer = state["trainer"]
    if not trainer["is_open"]:
        return ReshardingPlan()
    return ReshardingPlan(trainer["num_models"], {("trainer", "own_model"): "mean"})


def with_own_model(state: State) -> State:
    """Return the state with its own model in the parameters' place, where it is within training."""
    trainer = state["trainer"]
    if not trainer["is_open"]:
        return state
    return {**state, "model": {**state["model"], **trainer["own_model"]}}
