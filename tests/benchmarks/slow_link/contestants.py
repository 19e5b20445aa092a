"""List the methods that race, and the settings that each may choose from."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from torch import nn
from torch.optim import Optimizer

from tests.benchmarks.slow_link.diloco import diloco
from tests.benchmarks.slow_link.method import Enter, Entered, Ranks, Settings, weights_of
from tests.benchmarks.slow_link.torch_methods import ddp, ddp_fp16, ddp_powersgd, post_local_sgd
from training.trainers import Bmuf, Gtc, Htm


@contextmanager
def gtc(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Exchange thresholded gradients among all ranks."""
    threshold = settings.gradient_threshold
    with Gtc(model, optimizer, group=ranks.group, gradient_threshold=threshold):
        yield Entered(model, optimizer, weights_of(model), sums=True)


@contextmanager
def bmuf(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Train each rank alone within a block."""
    with Bmuf(model, optimizer, group=ranks.group, block_size=settings.block_size) as trainer:
        yield Entered(model, optimizer, lambda: trainer.state_dict()["global_model"], sums=True)


@contextmanager
def htm(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Exchange thresholded gradients within a host, and average blocks across hosts."""
    with Htm(
        model,
        optimizer,
        group=ranks.group,
        group_size=ranks.ranks_per_host,
        block_size=settings.block_size,
        gradient_threshold=settings.gradient_threshold,
    ) as trainer:
        yield Entered(model, optimizer, lambda: trainer.state_dict()["global_model"], sums=True)


@dataclass(frozen=True)
class Contestant:
    """Contestant holds a method, and the settings that it chooses from."""

    enter: Enter
    grid: tuple[Settings, ...]


def _grid(**choices: tuple[float, ...]) -> tuple[Settings, ...]:
    chosen = product(*choices.values())
    return tuple(Settings(**dict(zip(choices, values, strict=True))) for values in chosen)


# Chosen around what was best in trials of each method; all but plain DDP have four to choose from.
BLOCK_SIZES = (50, 100)
THRESHOLDS = (1 / 128, 1 / 64)
DDP_GRID = _grid(learning_rate=(0.05, 0.1))
CONTESTANTS = {
    "DDP": Contestant(ddp, DDP_GRID),
    "DDP, fp16 hook": Contestant(ddp_fp16, DDP_GRID),
    "DDP, PowerSGD hook": Contestant(
        ddp_powersgd, _grid(learning_rate=(0.025, 0.05), matrix_rank=(1, 4))
    ),
    "post-local SGD": Contestant(
        post_local_sgd, _grid(learning_rate=(0.05, 0.1), block_size=BLOCK_SIZES)
    ),
    "DiLoCo (torchft)": Contestant(
        diloco, _grid(learning_rate=(0.0125, 0.025), block_size=BLOCK_SIZES)
    ),
    "GTC": Contestant(gtc, _grid(learning_rate=(0.025, 0.05), gradient_threshold=THRESHOLDS)),
    "BMUF": Contestant(bmuf, _grid(learning_rate=(0.1, 0.2), block_size=BLOCK_SIZES)),
    "HTM": Contestant(
        htm, _grid(learning_rate=(0.05,), block_size=BLOCK_SIZES, gradient_threshold=THRESHOLDS)
    ),
}
