"""Do work on a device again and again, on a GPU as a graph."""

from collections.abc import Callable

import torch

from training.fit.steps import capture


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Make a graph of `work` on a GPU, whose tensors stay with it; on a CPU return it as it is."""
    if device.type != "cuda":
        return work
    replay = capture(work, device)

    def again() -> Callable[[], object]:
        replay()
        return work

    return again


def repeated(
    work: Callable[[], object], num_times: int, device: torch.device
) -> Callable[[], None]:
    """Do `work` this many times, and wait for the device at the end."""

    def repeat() -> None:
        for _ in range(num_times):
            work()
        synchronize(device)

    return repeat


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
