"""Share what decentralized trainers do: a model of each rank's own, whose mean is evaluated."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.distributed import collectives
from training.distributed.finiteness import FiniteCheck, FirstFault
from training.distributed.pending_exchanges import PendingExchange, start_sum
from training.distributed.process_group import is_read_at_once
from training.trainers.replica.parameters import FlatParameters
from training.trainers.statistics import AdPsgdStatistics, SynchronousStatistics
from training.trainers.trainer import STEPS_BETWEEN_COMPARISONS, Trainer


class PendingMean:
    """PendingMean is a mean of all ranks' models under way; the rank trains on meanwhile."""

    def __init__(self, total: PendingExchange, parameters: FlatParameters, num_models: int) -> None:
        self._total, self._parameters, self._num_models = total, parameters, num_models

    def is_done(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._total.is_done()

    def wait(self) -> dict[str, Tensor]:
        """Wait until all ranks have started theirs; return the mean by parameter."""
        mean = self._total.wait() / self._num_models
        return self._parameters.by_name(mean.to(self._parameters.device))


class OwnModels(Trainer):
    """OwnModels trains L different models, and leaves their mean, the model to evaluate (001 2).

    Each rank's optimizer applies the rank's own gradient, and ranks average models. So a frame
    counts 1 / L of what it counts where gradients are summed: a rate L times as high gives the mean
    of the models the same steps. A gradient that is not finite raises FloatingPointError on its
    rank, on a GPU up to 32 steps later; the other ranks' next exchange with it fails.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, group: ProcessGroup) -> None:
        super().__init__(model, optimizer, group=group)
        self._fault = FirstFault(self.parameters.device)

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return nothing: parameters differ on all ranks, from the first step on."""
        return {}

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return nothing: each optimizer's state follows from its rank's own gradients."""
        return {}

    def carry_over(self, old: FlatParameters) -> None:
        """Look for NaNs where the model now lies."""
        del old
        self.forget_faults()

    def forget_faults(self) -> None:
        """Look for NaNs from now on."""
        self._fault = FirstFault(self.parameters.device)

    def exchange_gradients(self) -> None:
        """Look at this rank's gradients, which no other rank sees; make the missing ones."""
        self._fault.note(self.num_steps + 1, self.parameters.present_gradients())
        is_due = self.num_steps % STEPS_BETWEEN_COMPARISONS == 0
        # In a trial averages take a NaN to all ranks, which find it together in their mean.
        if not self._is_trial and (is_due or is_read_at_once(self.parameters.device)):
            self._fault.check(self.group.rank())
        self.parameters.fill_missing_gradients()

    def own_model(self) -> Float[Tensor, " elements"]:
        """Return this rank's column of W_k, in a vector of its own."""
        return self.parameters.weights()

    def mean_model(self) -> dict[str, Tensor]:
        """Return the mean of all ranks' models, which is the one to evaluate, by parameter.

        All ranks call this together, between two steps. The training is the same without it.
        """
        return self.start_mean_model().wait()

    @torch.no_grad()
    def start_mean_model(self) -> PendingMean:
        """Start what `mean_model` waits for, from this rank's model of now.

        All ranks call this after the same step, each when it is there, and train on.
        """
        with self._traffic.counting(self.groups()):
            total = self._start_total()
        return PendingMean(total, self.parameters, self.group.size())

    def conclude(self) -> None:
        """Leave the mean of the models, the same on all ranks.

        Raises FloatingPointError on all ranks where the gradient of one was not finite.
        """
        mean = self._mean()
        finite = FiniteCheck(self.group, self.parameters.device)
        finite.examine(self.num_steps, [mean], lambda: self._fault.step)
        finite.check()
        self.parameters.set_weights(mean)

    def _start_total(self) -> PendingExchange:
        return start_sum(self.own_model(), self.group, "models")

    def _mean(self) -> Float[Tensor, " elements"]:
        mean = self.own_model()
        collectives.all_reduce_mean(mean, self.group)
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Add the number of models, and the names of what each rank has of its own."""
        self._fault.check(self.group.rank())
        own = {"num_models": self.group.size(), "trained": list(self.parameters.named)}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError within the training of another number of models."""
        super().load_state_dict(state)
        if self._is_open and state["num_models"] != self.group.size():
            raise ValueError(
                f"the checkpoint is of {state['num_models']} models, this group has "
                f"{self.group.size()} ranks: reshard it with training.checkpoints.resharding"
            )

    def statistics(self) -> SynchronousStatistics | AdPsgdStatistics:
        """Return the steps, and the bytes of models that this process sent."""
        return SynchronousStatistics(num_steps=self.num_steps, bytes_sent=self._traffic.num_bytes)
