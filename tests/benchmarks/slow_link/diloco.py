"""Run torchft's DiLoCo and Streaming DiLoCo, optional peers: `pip install torchft` brings all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.benchmarks.slow_link.method import (
    EXCHANGE_LIMIT_S,
    Entered,
    Ranks,
    Settings,
    weights_of,
)

OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo's paper
NUM_FRAGMENTS, SYNC_DELAY, MIXING = 2, 5, 0.5  # Streaming DiLoCo's tau and alpha (2501.18512)
TICK_MS = 10  # between the lighthouse's looks at who is there; by default 100, for each block


@contextmanager
def diloco(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Run DiLoCo: each rank is a replica, with Nesterov momentum on the models' mean update."""
    with _running(model, [model], optimizer, ranks, settings):
        yield Entered(model, optimizer, weights_of(model))


@contextmanager
def streaming_diloco(
    model: nn.Module, optimizer: Optimizer, ranks: Ranks, settings: Settings
) -> Iterator[Entered]:
    """Run Streaming DiLoCo: halves of the model in turn, each exchange beside the next steps.

    Evaluated are the fragments' global weights. The paper's 4-bit exchange is not in torchft; its
    own quantization needs a GPU.
    """
    assert isinstance(model, nn.Sequential)
    size = -(-len(model) // NUM_FRAGMENTS)
    fragments = [model[first : first + size] for first in range(0, len(model), size)]
    delayed = {"fragment_sync_delay": SYNC_DELAY, "fragment_update_alpha": MIXING}
    with _running(model, fragments, optimizer, ranks, settings, **delayed) as running:

        def weights() -> dict[str, Tensor]:
            parts = [fragment.original_parameters for fragment in running._fragments]
            return {name: value for part in parts for name, value in part.items()}

        yield Entered(model, optimizer, weights)


@contextmanager
def _running(
    model: nn.Module,
    fragments: Sequence[nn.Module],
    optimizer: Optimizer,
    ranks: Ranks,
    settings: Settings,
    **streaming: float,
) -> Iterator[Any]:
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415 - an optional peer
    from torchft.local_sgd import DiLoCo  # noqa: PLC0415

    lighthouse, lighthouse_address = _lighthouse(ranks)
    store = dist.TCPStore(ranks.address, 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=EXCHANGE_LIMIT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=ranks.group.size(),
        use_async_quorum=False,
        init_sync=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=ranks.address,
        store_port=store.port,
        lighthouse_addr=lighthouse_address,
        replica_id=f"rank_{ranks.group.rank():03}",
        hostname=ranks.address,
    )
    outer = [
        torch.optim.SGD(
            each.parameters(), lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True
        )
        for each in fragments
    ]
    size = settings.block_size
    try:
        with DiLoCo(
            manager, fragments, optimizer, outer, size, use_bucketization=True, **streaming
        ) as running:
            yield running
    finally:
        dist.barrier(group=ranks.group)
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def _lighthouse(ranks: Ranks) -> tuple[Any, str]:
    """Start torchft's membership server on rank 0, and send its address to all."""
    from torchft.coordination import LighthouseServer  # noqa: PLC0415

    server, port = None, torch.zeros(1, dtype=torch.int64)
    if ranks.group.rank() == 0:
        server = LighthouseServer(
            bind=f"{ranks.address}:0", min_replicas=ranks.group.size(), quorum_tick_ms=TICK_MS
        )
        port += int(server.address().rpartition(":")[2])
    dist.broadcast(port, 0, group=ranks.group)
    return server, f"http://{ranks.first_address}:{int(port)}"
