"""Synchronous SGD: every step applies the sum of all ranks' gradients, uncompressed."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from training.distributed import collectives
from training.distributed.checks import FiniteCheck, FirstFault
from training.distributed.process_group import ProcessGroup
from training.trainers.parameters import FlatParameters
from training.trainers.trainer import SynchronousStatistics, Trainer


class Synchronous(Trainer):
    """Synchronous is every table's baseline: one process that sees all ranks' data in each step.

    A step, or on a GPU the next one, raises FloatingPointError on all ranks, where the gradient of
    one is not finite.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, group: ProcessGroup) -> None:
        super().__init__(model, optimizer, group=group)
        self._finite = FiniteCheck(group, self.parameters.device)

    def carry_over(self, old: FlatParameters) -> None:
        """Look for NaNs where the model now lies."""
        del old
        self.forget_faults()

    def forget_faults(self) -> None:
        """Look for NaNs from now on."""
        self._finite = FiniteCheck(self.group, self.parameters.device)

    def exchange_gradients(self) -> None:
        """Replace each gradient by its sum over the ranks."""
        self._finite.check()
        step = self.num_steps + 1
        if self.group.size() == 1:  # two copies and gloo's thread are 3 % of a small model's step
            self.parameters.fill_missing_gradients()
            present = self.parameters.present_gradients()
            self._finite.examine(step, present, self._own_fault)
            return
        gradients = self.parameters.gradients()
        # The sum makes N ranks equal one process on N minibatches, also of unequal lengths.
        collectives.all_reduce_sum(gradients, self.group)
        self._finite.examine(step, [gradients], self._own_fault)
        self.parameters.set_gradients(gradients)

    def conclude(self) -> None:
        """Leave the model as it is; raises what the last step's gradients call for."""
        self._finite.check()

    def state_dict(self) -> dict[str, Any]:
        """Copy the whole state; raises what the last step's gradients call for."""
        self._finite.check()
        return super().state_dict()

    def statistics(self) -> SynchronousStatistics:
        """Return the steps, and the bytes of gradients that this process sent."""
        return SynchronousStatistics(num_steps=self.num_steps, bytes_sent=self._traffic.num_bytes)

    def _own_fault(self) -> Tensor:
        fault = FirstFault(self.parameters.device)
        fault.note(self.num_steps + 1, self.parameters.present_gradients())
        return fault.step
