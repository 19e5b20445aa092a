"""Run methods of torch itself: DistributedDataParallel with its hooks, and post-local SGD."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.benchmarks.slow_link.method import Entered, Ranks, Settings, weights_of

BUCKET_MB = 1000
FIRST_COMPRESSED_STEP = 2  # the least that DDP's rebuilding of buckets permits


@contextmanager
def ddp(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Run synchronous SGD: a ring sums gradients while others are still being computed."""
    del settings
    module = DistributedDataParallel(model, process_group=ranks.group)
    yield Entered(module, optimizer, weights_of(model))


@contextmanager
def ddp_fp16(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Do the same with gradients of 16 bits on the wire."""
    del settings
    module = DistributedDataParallel(model, process_group=ranks.group)
    module.register_comm_hook(ranks.group, fp16_compress_hook)
    yield Entered(module, optimizer, weights_of(model))


@contextmanager
def ddp_powersgd(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Do the same with low-rank gradients and error feedback, almost from the first step."""
    # In one bucket: the hook's exchanges of two would meet in another order on another rank.
    module = DistributedDataParallel(model, process_group=ranks.group, bucket_cap_mb=BUCKET_MB)
    state = PowerSGDState(
        ranks.group,
        matrix_approximation_rank=settings.matrix_rank,
        start_powerSGD_iter=FIRST_COMPRESSED_STEP,
    )
    module.register_comm_hook(state, powerSGD_hook)
    yield Entered(module, optimizer, weights_of(model))


@contextmanager
def post_local_sgd(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Average gradients within a host at each step, models over all ranks at a block's end.

    This omits the usual synchronous first phase, which would cost more than all the rest.
    """
    lower, _ = dist.new_subgroups(ranks.ranks_per_host)
    module = DistributedDataParallel(model, process_group=ranks.group)
    module.register_comm_hook(PostLocalSGDState(ranks.group, lower, 0), post_localSGD_hook)
    averager = PeriodicModelAverager(
        settings.block_size, warmup_steps=settings.block_size - 1, process_group=ranks.group
    )
    yield Entered(module, PostLocalSGDOptimizer(optimizer, averager), weights_of(model))
