"""The device that simulated ranks share: a CPU, or a GPU with a CUDA stream for each rank.

One rank's Python runs at a time. On a GPU it only queues kernels, and those of several ranks run
side by side: an LSTM's products over one minibatch leave most of a large GPU idle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Moment(Protocol):
    """Moment is a point in what a rank has queued: an event of its stream."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let what is queued on `stream` from now on begin after it."""


class SharedDevice:
    """SharedDevice is a CPU: work is done when it is called, so turns order it."""

    queues_work = False
    """Whether calls return before their work is done."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work within as one rank, in a thread of its own."""
        yield

    def now(self) -> Moment | None:
        """Return the moment after all that this thread has called so far."""
        return None

    def wait_for(self, moment: Moment | None, *tensors: Tensor) -> None:
        """Let this thread's later work begin after `moment`; it reads `tensors` of another rank."""

    def random_state(self) -> list[Tensor]:
        """Return the states of torch's generators, which all ranks share."""
        return [torch.get_rng_state()]

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        """Restore `random_state()`."""
        torch.set_rng_state(states[0])


class SharedGpu(SharedDevice):
    """SharedGpu has a CUDA stream for each rank, and events where ranks read of each other.

    No host waits. torch deals 32 streams in turn, so that of more ranks two may share one, which
    orders more than is necessary.
    """

    queues_work = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def working(self) -> Iterator[None]:
        """Queue within on a stream of its own, which remains the thread's while others run."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield

    def now(self) -> Moment:
        """Record an event on this thread's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_for(self, moment: Moment | None, *tensors: Tensor) -> None:
        """Let this thread's stream wait for the event."""
        stream = torch.cuda.current_stream(self._device)
        if moment is not None:
            moment.wait(stream)
        for tensor in tensors:
            # Else the memory of a tensor that its own rank drops could be written meanwhile.
            if tensor.device.type == self._device.type:
                tensor.record_stream(stream)

    def random_state(self) -> list[Tensor]:
        """Return the states of the CPU's generator and of the device's, without waiting for it."""
        return [*super().random_state(), torch.cuda.get_rng_state(self._device)]

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        """Restore `random_state()`."""
        super().set_random_state(states)
        torch.cuda.set_rng_state(states[1], self._device)


def shared_device(device: torch.device) -> SharedDevice:
    """Return the way in which simulated ranks share `device`."""
    return SharedGpu(device) if device.type == "cuda" else SharedDevice()
