"""SparseLoCo: local steps, then the sparse mean of the changes (arXiv 2508.15706, algorithm 1)."""

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.configuration.block_codes import TopK
from training.trainers.bmuf import Bmuf


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
