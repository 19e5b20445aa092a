"""Copy minibatches to a device while it computes, so that no step waits for its data."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import fields, replace

import torch
from torch import Tensor

from training.data.minibatch import Minibatch


def device_copies(
    minibatches: Generator[Minibatch, None, None], device: torch.device
) -> Generator[Minibatch, None, None]:
    """Return the minibatches with features and targets on `device`; on a CPU, themselves.

    A GPU copies each one from pinned memory on a stream of its own, while the step before is under
    way there. Lengths remain on the host, where packing needs them. Closing ends the reading, too.
    """
    return minibatches if device.type == "cpu" else _copies(minibatches, device)


def _copies(
    minibatches: Generator[Minibatch, None, None], device: torch.device
) -> Generator[Minibatch, None, None]:
    copy = _copy_beside_steps(device) if device.type == "cuda" else _copy_at_once(device)
    with closing(minibatches):
        for minibatch in minibatches:
            yield copy(minibatch)


def _copy_at_once(device: torch.device) -> Callable[[Minibatch], Minibatch]:
    return lambda minibatch: _moved(minibatch, lambda values: values.to(device))


def _copy_beside_steps(device: torch.device) -> Callable[[Minibatch], Minibatch]:
    """Copy on a stream beside that of the steps, for which the host does not wait."""
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move(values: Tensor) -> Tensor:
        # Copies from pageable memory would wait for the device.
        return values.pin_memory().to(device, non_blocking=True)

    def use(values: Tensor) -> Tensor:
        # Else the copying stream could reuse the memory before the step has read it.
        values.record_stream(torch.cuda.current_stream(device))
        return values

    def copy(minibatch: Minibatch) -> Minibatch:
        with torch.cuda.stream(copying):
            copied = _moved(minibatch, move)
        torch.cuda.current_stream(device).wait_stream(copying)
        return _moved(copied, use)

    return copy


def _moved(minibatch: Minibatch, move: Callable[[Tensor], Tensor]) -> Minibatch:
    targets = minibatch.targets
    moved = (move(getattr(targets, field.name)) for field in fields(targets))
    return replace(minibatch, features=move(minibatch.features), targets=type(targets)(*moved))
