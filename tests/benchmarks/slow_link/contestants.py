"""List the methods that race, and the settings that each may choose from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from torch import nn
from torch.optim import Optimizer

from tests.benchmarks.slow_link.diloco import diloco, streaming_diloco
from tests.benchmarks.slow_link.method import Enter, Entered, Ranks, Settings, weights_of
from tests.benchmarks.slow_link.torch_methods import ddp, ddp_fp16, ddp_powersgd, post_local_sgd
from training.settings.trainers import EXACT, Bfloat16, BlockCode, TopK
from training.trainers import Bmuf, Gtc, Htm, SparseLoco

MakeCode = Callable[[Settings], BlockCode]


def exact(settings: Settings) -> BlockCode:
    """Send float32."""
    del settings
    return EXACT


def bfloat16(settings: Settings) -> BlockCode:
    """Send bfloat16: a baseline of 32 bits flatters what is compared with it."""
    del settings
    return Bfloat16()


def top_k(settings: Settings) -> BlockCode:
    """Send the largest changes in 2 bits; more bits are not nearer to the exact exchange here."""
    return TopK(density=settings.density)


@contextmanager
def gtc(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Exchange thresholded gradients among all ranks."""
    threshold = settings.gradient_threshold
    with Gtc(model, optimizer, group=ranks.group, gradient_threshold=threshold):
        yield Entered(model, optimizer, weights_of(model), sums=True)


def bmuf(code: MakeCode = exact, by_host: bool = False) -> Enter:
    """Make a method that trains each rank alone within a block; leaders exchange for their host."""

    @contextmanager
    def enter(
        model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
    ) -> Iterator[Entered]:
        with Bmuf(
            model,
            optimizer,
            group=ranks.group,
            block_size=settings.block_size,
            block_exchange=code(settings),
            ranks_per_leader=ranks.ranks_per_host if by_host else 1,
        ) as trainer:
            yield Entered(model, optimizer, lambda: trainer.state_dict()["global_model"], sums=True)

    return enter


def htm(code: MakeCode = exact) -> Enter:
    """Make a method that thresholds gradients within a host, and averages blocks across hosts."""

    @contextmanager
    def enter(
        model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
    ) -> Iterator[Entered]:
        with Htm(
            model,
            optimizer,
            group=ranks.group,
            group_size=ranks.ranks_per_host,
            block_size=settings.block_size,
            gradient_threshold=settings.gradient_threshold,
            block_exchange=code(settings),
        ) as trainer:
            yield Entered(model, optimizer, lambda: trainer.state_dict()["global_model"], sums=True)

    return enter


def sparse_loco(by_host: bool) -> Enter:
    """Make a method of local steps and sparse changes, of each rank or of each host."""

    @contextmanager
    def enter(
        model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
    ) -> Iterator[Entered]:
        with SparseLoco(
            model,
            optimizer,
            group=ranks.group,
            block_size=settings.block_size,
            density=settings.density,
            ranks_per_leader=ranks.ranks_per_host if by_host else 1,
        ) as trainer:
            yield Entered(model, optimizer, lambda: trainer.state_dict()["global_model"], sums=True)

    return enter


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
BMUF_GRID = _grid(learning_rate=(0.1, 0.2), block_size=BLOCK_SIZES)
TOP_K_GRID = _grid(learning_rate=(0.2,), block_size=BLOCK_SIZES, density=(0.1, 0.13))
SPARSE_LOCO_GRID = _grid(learning_rate=(0.1, 0.2), block_size=(25, 50), density=(0.1,))
HTM_GRID = _grid(learning_rate=(0.05,), block_size=BLOCK_SIZES, gradient_threshold=THRESHOLDS)
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
    "Streaming DiLoCo (torchft)": Contestant(
        streaming_diloco, _grid(learning_rate=(0.0125, 0.025), block_size=BLOCK_SIZES)
    ),
    "BMUF": Contestant(bmuf(), BMUF_GRID),
    "BMUF, bfloat16": Contestant(bmuf(bfloat16), BMUF_GRID),
    "BMUF by host": Contestant(bmuf(by_host=True), BMUF_GRID),
    "BMUF by host, bfloat16": Contestant(bmuf(bfloat16, by_host=True), BMUF_GRID),
    "BMUF by host, top-k": Contestant(bmuf(top_k, by_host=True), TOP_K_GRID),
    "BMUF, top-k": Contestant(bmuf(top_k), TOP_K_GRID),
    "SparseLoCo": Contestant(sparse_loco(by_host=False), SPARSE_LOCO_GRID),
    "SparseLoCo by host": Contestant(sparse_loco(by_host=True), SPARSE_LOCO_GRID),
    "HTM": Contestant(htm(), HTM_GRID),
    "HTM, bfloat16": Contestant(htm(bfloat16), HTM_GRID),
    "HTM, top-k": Contestant(
        htm(top_k),
        _grid(
            learning_rate=(0.05,),
            block_size=(50,),
            gradient_threshold=THRESHOLDS,
            density=(0.05, 0.1),
        ),
    ),
}
