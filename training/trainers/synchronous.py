"""Synchronous SGD: every step applies the sum of all ranks' gradients, uncompressed."""

from torch import Tensor

from training.distributed import collectives
from training.distributed.checks import FirstFault
from training.settings.trainers import SynchronousConfig
from training.trainers.trainer import Trainer


class Synchronous(Trainer):
    """Synchronous is every table's baseline: one process that sees all ranks' data in each step.

    A step, or on a GPU the next one, raises FloatingPointError on all ranks, where the gradient of
    one is not finite.
    """

    record = SynchronousConfig

    def exchange_gradients(self) -> None:
        """Replace each gradient by its sum over the ranks."""
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

    def _own_fault(self) -> Tensor:
        fault = FirstFault(self.parameters.device)
        fault.note(self.num_steps + 1, self.parameters.present_gradients())
        return fault.step
