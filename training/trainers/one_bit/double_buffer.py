"""Exchange a half-minibatch's gradients while the next one is computed (paper 004 section 2.2)."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from training.distributed.communication_thread import CommunicationThread
from training.distributed.process_group import ProcessGroup, is_read_at_once
from training.distributed.simulated_group import SimulatedGroup


def needs_thread(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether exchanges run beside computation in a thread: a real GPU has streams."""
    return isinstance(group, SimulatedGroup) or is_read_at_once(device)


class PendingUpdate:
    """PendingUpdate is the update of a step whose exchange is under way.

    The second stage begins when the first has arrived, so a thread runs `work`, both stages. On a
    GPU this thread queues them on a stream of their own, and its host waits for neither.
    """

    def __init__(
        self,
        work: Callable[[], Float[Tensor, " elements"]],
        step: int,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self.step = step
        self._work = work
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread: CommunicationThread | None = None
        if needs_thread(group, device):
            self._thread = CommunicationThread(self._run, group, "1-bit exchange")
        else:
            self._run()

    def wait(self) -> Float[Tensor, " elements"]:
        """Return the update; raises the error that ended its exchange."""
        if self._thread is not None:
            self._thread.join()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._update.device)
            current.wait_stream(self._stream)
            self._update.record_stream(current)
        return self._update

    def _run(self) -> None:
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        # The training thread's no_grad() holds in that thread alone.
        with torch.no_grad(), stream:
            self._update = self._work()
