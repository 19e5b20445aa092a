"""Define the interface between a method and the training loop."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

EXCHANGE_LIMIT_S = 120


@dataclass(frozen=True)
class Settings:
    """Settings holds what differs from method to method."""

    learning_rate: float
    block_size: int = 1
    gradient_threshold: float = 0.0
    matrix_rank: int = 0
    density: float = 0.0


@dataclass(frozen=True)
class Ranks:
    """Ranks places this rank; ranks of one host are consecutive; addresses are its and rank 0's."""

    group: ProcessGroup
    ranks_per_host: int
    address: str
    first_address: str


@dataclass(frozen=True)
class Entered:
    """Entered is what the loop uses; `weights` are evaluated, the same everywhere at block ends.

    `sums` says that the optimizer gets the sum of the ranks' gradients, not their mean.
    """

    module: nn.Module
    optimizer: Optimizer
    weights: Callable[[], Mapping[str, Tensor]]
    sums: bool = False


Enter = Callable[[nn.Module, Optimizer, Ranks, Settings], AbstractContextManager[Entered]]


def weights_of(model: nn.Module) -> Callable[[], Mapping[str, Tensor]]:
    """Return the model's own weights, at the time of the call."""
    return lambda: dict(model.named_parameters())
