"""Capture work on a device as a CUDA graph, to be replayed and timed without launches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Replay:
    """Replay holds a captured graph, and the work whose tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]

    def __call__(self) -> None:
        """Do the work again, in the same memory."""
        self.graph.replay()


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Make a graph of `work`, which must not wait for the device; on a CPU return it as it is."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # a capture wants kernels compiled, and libraries started
        for _ in range(WARM_UP_STEPS):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return Replay(graph, work)


def repeated(
    work: Callable[[], object], num_times: int, device: torch.device
) -> Callable[[], None]:
    """Do `work` this many times, and wait for the device at the end."""

    def repeat() -> None:
        for _ in range(num_times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return repeat
