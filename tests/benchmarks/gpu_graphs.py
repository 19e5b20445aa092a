"""Work on a device, to be timed: as a CUDA graph, replayed without launches between kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Replay:
    """A captured graph, and the work whose tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]

    def __call__(self) -> None:
        """Do the work again, in the same memory."""
        self.graph.replay()


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Make a graph of `work`; fails where work waits for the device. On a CPU it stays as it is."""
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
    """Do `work` so often, and wait for the device at the end."""

    def repeat() -> None:
        for _ in range(num_times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return repeat
