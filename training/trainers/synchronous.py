"""Synchronous SGD: every step applies the sum of all ranks' gradients, uncompressed."""

from training.distributed import collectives
from training.trainers.trainer import Trainer


class Synchronous(Trainer):
    """The baseline of every table; equals one process that sees all ranks' data in each step."""

    def exchange_gradients(self) -> None:
        """Replace each gradient by its sum over the ranks."""
        gradients = self.parameters.gradients()
        collectives.all_reduce_sum(gradients, self.group)
        self.parameters.set_gradients(gradients)
