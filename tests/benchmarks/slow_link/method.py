"""What a method needs to start, and what it gives the training loop."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

EXCHANGE_LIMIT_S = 120


@dataclass(frozen=True)
class Settings:
    """What may differ from method to method."""

    learning_rate: float
    block_size: int = 1
    gradient_threshold: float = 0.0
    matrix_rank: int = 0


@dataclass(frozen=True)
class Ranks:
    """This rank's place; ranks of one host are consecutive, addresses are its and rank 0's."""

    group: ProcessGroup
    ranks_per_host: int
    address: str
    first_address: str


@dataclass(frozen=True)
class Entered:
    """What the loop uses; `weights` are those to evaluate, the same on all ranks at a block's end.

    `sums` says that the optimizer gets the sum of the ranks' gradients, not their mean.
    """

    module: nn.Module
    optimizer: Optimizer
    weights: Callable[[], Mapping[str, Tensor]]
    sums: bool = False


Enter = Callable[[nn.Module, Optimizer, Ranks, Settings], AbstractContextManager[Entered]]


def weights_of(model: nn.Module) -> Callable[[], Mapping[str, Tensor]]:
    """The model's own, as they are when asked for."""
    return lambda: dict(model.named_parameters())
