"""Copy minibatches to a device while it computes, so that no step waits for its data."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import fields, replace
from itertools import repeat

import torch
from torch import Tensor

from infra.prefetch import prefetch
from training.data.minibatch import Minibatch, Targets

MINIBATCHES_AHEAD = 2


def buffers_ahead(device: torch.device) -> int:
    """Return how many shuffle buffers a rank reads at a time, each in a thread.

    A GPU that trains the papers' student on 1.4 M frames a second takes what 2 to 4 cores read.
    """
    return 5 if device.type == "cuda" else 1


def device_copies(
    minibatches: Generator[Minibatch, None, None], device: torch.device
) -> Generator[Minibatch, None, None]:
    """Return the minibatches with features and targets on `device`; on a CPU, themselves.

    A thread makes each one in pinned memory, and the GPU copies it on a stream of its own, while
    the steps before are under way. Lengths remain on the host, where packing needs them. Closing
    ends the reading, too.
    """
    return minibatches if device.type == "cpu" else _copies(minibatches, device)


def _copies(
    minibatches: Generator[Minibatch, None, None], device: torch.device
) -> Generator[Minibatch, None, None]:
    copy = _copy_at_once(device)
    if device.type == "cuda":
        # Copies from pageable memory would wait for the device.
        minibatches = made_ahead(minibatches, Tensor.pin_memory)
        copy = _copy_beside_steps(device)
    with closing(minibatches):
        for minibatch in minibatches:
            yield copy(minibatch)


def made_ahead(
    minibatches: Generator[Minibatch, None, None], prepare: Callable[[Tensor], Tensor]
) -> Generator[Minibatch, None, None]:
    """Make the next minibatches in a thread, and prepare all but their lengths there.

    An error is raised when its minibatch's turn comes. Closing ends the thread, and the reading.
    """

    def make(_: None) -> Minibatch | None:
        minibatch = next(minibatches, None)
        return None if minibatch is None else _moved(minibatch, prepare)

    ahead = prefetch(make, repeat(None), MINIBATCHES_AHEAD + 1, num_threads=1)
    with closing(minibatches), closing(ahead):
        for _, minibatch in ahead:
            if minibatch is None:
                return
            yield minibatch


def _copy_at_once(device: torch.device) -> Callable[[Minibatch], Minibatch]:
    return lambda minibatch: _moved(minibatch, lambda values: values.to(device))


def _copy_beside_steps(device: torch.device) -> Callable[[Minibatch], Minibatch]:
    """Copy on a stream beside that of the steps, for which the host does not wait."""
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

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
    make: Callable[..., Targets] = type(targets)
    values = (getattr(targets, field.name) for field in fields(targets))
    # Lattices remain on the host, where their arithmetic is.
    moved = (move(each) if isinstance(each, Tensor) else each for each in values)
    return replace(minibatch, features=move(minibatch.features), targets=make(*moved))
