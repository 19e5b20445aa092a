"""SparseLoCo: local steps, then the sparse mean of the changes (arXiv 2508.15706, algorithm 1)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from infra.ranges import Range, check_ranges
from training.algorithms.sparsification.top_k import Bits, Density, ErrorDecay, TopK
from training.trainers.bmuf import Bmuf
from training.trainers.tiers import num_groups


class SparseLoco(Bmuf):
    """SparseLoco moves the model by the mean of what ranks send of their changes; see `TopK`.

    It is BMUF without block momentum: error feedback takes its place. Each rank keeps its
    optimizer's moments.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: ProcessGroup,
        block_size: int,
        density: float = 0.03,
        bits: int = 2,
        error_decay: float = 0.95,
        outer_learning_rate: float = 1.0,
        ranks_per_leader: int | None = 1,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            group=group,
            block_size=block_size,
            block_learning_rate=outer_learning_rate,
            block_momentum=0.0,
            block_exchange=TopK(density=density, bits=bits, error_decay=error_decay),
            ranks_per_leader=ranks_per_leader,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLocoConfig:
    """SparseLoCo: after a block of steps, ranks average the largest parts of their changes."""

    name: Literal["sparse_loco"] = "sparse_loco"
    block_size: Annotated[int, Range(1, 1_000_000)] = 50
    density: Density = 0.03
    bits: Bits = 2
    error_decay: ErrorDecay = 0.95
    outer_learning_rate: Annotated[float, Range(1e-6, 1000)] = 1.0
    ranks_per_leader: Annotated[int, Range(1, 1_000_000, zero="a host's ranks")] = 1

    num_state_vectors: ClassVar[int] = 4
    """BMUF's three, and the residual."""

    __post_init__ = check_ranges

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks have no leaders."""
        num_groups(num_ranks, self.ranks_per_leader or ranks_per_host, "ranks_per_leader")

    def make_trainer(
        self, model: nn.Module, optimizer: Optimizer, group: ProcessGroup
    ) -> SparseLoco:
        """Wrap model and optimizer; all ranks of `group` must call this together."""
        return SparseLoco(
            model,
            optimizer,
            group=group,
            block_size=self.block_size,
            density=self.density,
            bits=self.bits,
            error_decay=self.error_decay,
            outer_learning_rate=self.outer_learning_rate,
            ranks_per_leader=self.ranks_per_leader or None,
        )
