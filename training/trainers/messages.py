"""Exchange GTC's messages between ranks, at the length of their content or at a fixed one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms.gtc import compiled_encoding, encoding
from training.algorithms.gtc.gradient_threshold import (
    HEADER_WORDS,
    Encoding,
    add_message,
    num_map_words,
)
from training.distributed.finiteness import not_finite
from training.distributed.gather import Arrival, gather_equal, gather_ragged

MIN_CAPACITY = 2**13


class Messages(Protocol):
    """Messages exchanges what ranks send of their gradients; the rest stays in the residuals."""

    @property
    def num_sent(self) -> int:
        """Count this rank's elements that reached the threshold, in all steps of this object."""

    def sum_signs(
        self,
        residual: Float[Tensor, " elements"],
        gradients: Float[Tensor, " elements"],
        group: ProcessGroup,
    ) -> Int32[Tensor, " elements"]:
        """Count, for each element, the ranks that sent plus less those that sent minus."""

    def check(self) -> None:
        """Raise FloatingPointError, on all ranks, where a gradient was not finite."""

    def state(self) -> dict[str, int]:
        """Return what later messages depend on, besides the residual."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`; entries that it lacks start from their initial values."""


class ExactMessages:
    """ExactMessages are as long as they need to be: the host waits for their lengths."""

    def __init__(self, residual: Float[Tensor, " elements"], gradient_threshold: float) -> None:
        self._gradient_threshold = gradient_threshold
        self._counts: Tensor | None = None
        self._num_steps = 0
        self.num_sent = 0
        # Without a C compiler NumPy writes the same messages, at about half the speed.
        is_compiled = compiled_encoding.is_compiled()
        self._add_message = compiled_encoding.add_message if is_compiled else add_message
        self._take_message = (
            compiled_encoding.take_message
            if is_compiled and residual.dtype == torch.float32
            else encoding.take_message
        )

    def sum_signs(
        self,
        residual: Float[Tensor, " elements"],
        gradients: Float[Tensor, " elements"],
        group: ProcessGroup,
    ) -> Int32[Tensor, " elements"]:
        """Exchange one step's messages; raises FloatingPointError as `check` does elsewhere."""
        message = self._take_message(residual, gradients, self._gradient_threshold)
        # This exchange at every minibatch ends GTC's speed-up beyond 32 ranks (000 4.1).
        messages = gather_ragged(message, group, "gradients")
        self._num_steps += 1
        _check_finite([int(message[0]) for message in messages], self._num_steps)
        self.num_sent += int(message[1])
        if self._counts is None:  # once: new memory is slower than the work on it
            self._counts = torch.empty_like(residual, dtype=torch.int32)
        self._counts.zero_()
        for message in messages:
            self._add_message(self._counts, message)
        return self._counts

    def check(self) -> None:
        """Do nothing: each step has raised its own."""

    def state(self) -> dict[str, int]:
        """Return nothing: no message depends on an earlier one."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume the count of steps."""
        self._num_steps = state.get("num_steps", 0)


class FixedMessages:
    """FixedMessages have a length that the host knows beforehand, so that it never waits.

    The last step decides the length: room for twice what any rank then had to send. The first
    length is that of a map, which holds everything. Elements without room stay in the residual and
    are sent first in the next step. A gradient that is not finite adds nothing, and is reported one
    step later.
    """

    def __init__(self, residual: Float[Tensor, " elements"], gradient_threshold: float) -> None:
        self._gradient_threshold = residual.new_tensor(gradient_threshold)
        self._num_elements = len(residual)
        # Messages take blocks round the model from here, so no element waits without bound.
        self._first_block = torch.zeros((), dtype=torch.int32, device=residual.device)
        self._arrival: Arrival | None = None
        self._num_sent = torch.zeros((), dtype=torch.int64, device=residual.device)
        self._num_steps = 0
        self.capacity = num_map_words(len(residual))

    @property
    def num_sent(self) -> int:
        """Count this rank's elements that reached the threshold; waits for the device."""
        return int(self._num_sent)

    def sum_signs(
        self,
        residual: Float[Tensor, " elements"],
        gradients: Float[Tensor, " elements"],
        group: ProcessGroup,
    ) -> Int32[Tensor, " elements"]:
        """Exchange one step's messages, all as long as the last step's headers let expect."""
        # Here, as Triton comes with torch's builds for CUDA alone.
        from training.algorithms.gtc import cuda_encoding  # noqa: PLC0415

        self.check()
        with torch.cuda.device(residual.get_device()):
            message = cuda_encoding.take_message(
                residual, gradients, self._gradient_threshold, self.capacity, self._first_block
            )
            messages = gather_equal(message, group, "gradients")
            self._num_steps += 1
            self._num_sent += message[1]
            self._arrival = Arrival(messages[:, :HEADER_WORDS])
            counts = torch.zeros_like(residual, dtype=torch.int32)
            cuda_encoding.add_messages(counts, messages)
        return counts

    def check(self) -> None:
        """Look at the last step's headers: raise FloatingPointError, or choose the next length."""
        if self._arrival is None:
            return
        encodings, wanted = self._arrival.values().T.tolist()
        self._arrival = None
        _check_finite(encodings, self._num_steps)
        # A fixed N / 16 would send 6.25 MB a rank at 25 M elements where 0.1 MB do.
        self.capacity = capacity_for(max(wanted), self._num_elements)

    def state(self) -> dict[str, int]:
        """Return the next message's length, and where it begins to take elements."""
        self.check()
        return {"message_capacity": self.capacity, "first_block": int(self._first_block)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`; entries that it lacks start from their initial values."""
        self._arrival = None
        self._num_steps = state.get("num_steps", 0)
        self.capacity = state.get("message_capacity", num_map_words(self._num_elements))
        self._first_block.fill_(state.get("first_block", 0))


def capacity_for(num_wanted: int, num_elements: int) -> int:
    """Return the words that hold twice `num_wanted` elements, rounded to few different lengths."""
    doubled = 1 << (2 * max(num_wanted, 1) - 1).bit_length()
    return min(max(doubled, MIN_CAPACITY), num_map_words(num_elements))


def _check_finite(encodings: Sequence[int], step: int) -> None:
    for rank, found in enumerate(encodings):
        if found == Encoding.NOT_FINITE:
            raise not_finite(rank, step)
