"""Synchronous SGD: every step applies the sum of all ranks' gradients, uncompressed."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.trainers.trainer import Trainer


class Synchronous(Trainer):
    """Synchronous is every table's baseline: one process that sees all ranks' data in each step."""

    def exchange_gradients(self) -> None:
        """Replace each gradient by its sum over the ranks."""
        gradients = self.parameters.gradients()
        # The sum makes N ranks equal one process on N minibatches, also of unequal lengths.
        collectives.all_reduce_sum(gradients, self.group)
        self.parameters.set_gradients(gradients)


@dataclass(frozen=True, slots=True)
class SynchronousConfig:
    """Synchronous SGD: every step applies the sum of all ranks' gradients."""

    name: Literal["synchronous"] = "synchronous"

    num_state_vectors: ClassVar[int] = 0
    """Vectors of the model's size in the trainer's state."""

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Accept any number of ranks."""

    def make_trainer(
        self, model: nn.Module, optimizer: Optimizer, group: ProcessGroup
    ) -> Synchronous:
        """Wrap model and optimizer; all ranks of `group` must call this together."""
        return Synchronous(model, optimizer, group=group)
