"""Train by synchronous SGD with gradient threshold compression (003 VI-A, 000 2.1).

On a CPU ranks exchange messages as long as their content, on a GPU messages of a fixed length, for
which no host waits. `training.algorithms.gtc` writes and reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms.gtc.encoding import (
    HEADER_WORDS,
    MAX_ELEMENTS,
    Encoding,
    add_message,
    compiled_add_message,
    compiled_take_message,
    is_compiled,
    num_map_words,
    take_message,
)
from training.distributed import collectives
from training.distributed.checks import FiniteCheck, FirstFault, not_finite
from training.distributed.collectives import Arrival, gather_equal, gather_ragged
from training.settings.trainers import GtcConfig, HtmConfig
from training.trainers.parameters import FlatParameters
from training.trainers.trainer import ReshardingPlan, State, Statistics, Trainer, density, norm_of

MIN_CAPACITY = 2**13

Elements: TypeAlias = Float[Tensor, " elements"]
"""A number of each element of all trained parameters in a row."""


class ExactMessages:
    """ExactMessages are as long as they need to be: the host waits for their lengths.

    What a message does not hold of the gradients stays in the residual. `num_sent` counts this
    rank's elements that reached the threshold, in all steps of this object.
    """

    def __init__(self, residual: Elements, gradient_threshold: float, first_rank: int = 0) -> None:
        self._gradient_threshold, self._first_rank = gradient_threshold, first_rank
        self._counts: Tensor | None = None
        self._num_steps = 0
        self.num_sent = 0
        # Without a C compiler NumPy writes the same messages, in several times the time.
        takes_compiled = is_compiled() and residual.dtype == torch.float32
        self._add_message = compiled_add_message if is_compiled() else add_message
        self._take_message = compiled_take_message if takes_compiled else take_message

    def sum_signs(
        self, residual: Elements, gradients: Elements, group: ProcessGroup
    ) -> Int32[Tensor, " elements"]:
        """Count, for each element, the ranks that sent plus less those that sent minus.

        Raises FloatingPointError, on all ranks, where a gradient is not finite.
        """
        message = self._take_message(residual, gradients, self._gradient_threshold)
        # This exchange at every minibatch ends GTC's speed-up beyond 32 ranks (000 4.1).
        messages = gather_ragged(message, group, "gradients")
        self._num_steps += 1
        encodings = [int(message[0]) for message in messages]
        _check_finite(encodings, self._num_steps, self._first_rank)
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

    def __init__(self, residual: Elements, gradient_threshold: float, first_rank: int = 0) -> None:
        self._gradient_threshold = residual.new_tensor(gradient_threshold)
        self._first_rank = first_rank
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
        self, residual: Elements, gradients: Elements, group: ProcessGroup
    ) -> Int32[Tensor, " elements"]:
        """Do what `ExactMessages` does, but raise FloatingPointError for the step before.

        All messages are as long as the last step's headers let expect.
        """
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
        _check_finite(encodings, self._num_steps, self._first_rank)
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


def _check_finite(encodings: Sequence[int], step: int, first_rank: int) -> None:
    for rank, found in enumerate(encodings, first_rank):
        if found == Encoding.NOT_FINITE:
            raise not_finite(rank, step)


class ThresholdedSum:
    """ThresholdedSum adds what ranks send of their gradients; the rest stays in its residual.

    With gradient_threshold 0 the sum is that of the gradients, unquantized, and nothing stays.
    Errors number a group's ranks from `first_rank` on, that of its rank 0 among all.
    """

    def __init__(self, residual: Elements, gradient_threshold: float, first_rank: int = 0) -> None:
        if gradient_threshold > 0 and len(residual) > MAX_ELEMENTS:
            raise ValueError(
                f"{len(residual)} parameters: need at most {MAX_ELEMENTS}, a message's 31-bit index"
            )
        self.residual = residual
        self.gradient_threshold, self._first_rank = gradient_threshold, first_rank
        # A GPU stalls where its host waits for a message's length, so there the length is fixed.
        self._messages: ExactMessages | FixedMessages = (
            FixedMessages(residual, gradient_threshold, first_rank)
            if residual.is_cuda
            else ExactMessages(residual, gradient_threshold, first_rank)
        )
        self._finite: FiniteCheck | None = None
        self._num_steps = 0
        self._num_elements = 0
        self._num_sent_before = 0

    def of(self, gradients: Elements, group: ProcessGroup) -> Elements:
        """Exchange one step's gradients, which are overwritten.

        Raises FloatingPointError, on all ranks, where one rank's gradient is not finite: the
        residual would hide a NaN for ever. On a GPU the next step raises it, or `check`.
        """
        # A tiny tau starves the model instead of becoming synchronous SGD, so 0 means unquantized.
        self._num_elements += len(gradients)
        if self.gradient_threshold > 0:
            counts = self._messages.sum_signs(self.residual, gradients, group)
            # Signs are summed as integers and meet tau once, so the order of ranks changes no bit.
            return gradients.copy_(counts).mul_(self.gradient_threshold)
        self._finite = self._finite or FiniteCheck(group, gradients.device, self._first_rank)
        self._finite.check()
        self._num_steps += 1
        fault = FirstFault(gradients.device)
        fault.note(self._num_steps, [gradients])
        collectives.all_reduce_sum(gradients, group)
        self._finite.examine(self._num_steps, [gradients], lambda: fault.step)
        return gradients

    def check(self) -> None:
        """Raise FloatingPointError, on all ranks, where the last step's gradients call for it."""
        self._messages.check()
        if self._finite is not None:
            self._finite.check()

    def statistics(self) -> Statistics:
        """Say what becomes of this rank's gradients; waits for the residual's device.

        `density` is the share of gradient elements whose residual reached the threshold. A
        Euclidean `residual_norm` that keeps growing means a threshold too small at a high density,
        as an element sends the threshold once a step at most, and one too large at a density near
        0.
        """
        num_sent = self._num_sent()
        return {
            "num_elements": self._num_elements,
            "num_elements_sent": num_sent,
            "density": density(num_sent, self._num_elements),
            "residual_norm": norm_of(self.residual),
        }

    def _num_sent(self) -> int:
        if self.gradient_threshold == 0:
            return self._num_elements
        return self._num_sent_before + self._messages.num_sent

    def state(self) -> dict[str, int]:
        """Return what later sums depend on, besides the residual; raises as `check` does."""
        self.check()
        return self._messages.state()

    def restore(self, residual: Elements, state: Mapping[str, Any]) -> None:
        """Resume from a residual and `state()`."""
        self.residual = residual
        self._finite = None
        self._num_steps = state.get("num_steps", 0)
        self._messages.restore(state)

    def carried_over(
        self, old: FlatParameters, new: FlatParameters, num_steps: int
    ) -> "ThresholdedSum":
        """Return a sum for the `new` parameters, which takes over the residual by their names."""
        residual = new.carry_over(self.residual, old)
        carried = ThresholdedSum(residual, self.gradient_threshold, self._first_rank)
        carried.restore(residual, {"num_steps": num_steps})
        carried._num_elements = self._num_elements
        carried._num_sent_before = self._num_sent()
        return carried


class ThresholdTrainer(Trainer):
    """ThresholdTrainer has a `ThresholdedSum`, whose residual it keeps from step to step."""

    config: GtcConfig | HtmConfig

    def set_up(self) -> None:
        """Begin with an empty residual."""
        super().set_up()
        threshold = self.config.gradient_threshold
        self._sum = ThresholdedSum(self.parameters.zeros(), threshold, self.first_rank)

    @property
    def first_rank(self) -> int:
        """Return the number, among all ranks, of the first one that shares this one's gradients."""
        return 0

    def carry_over(self, old: FlatParameters) -> None:
        """Keep the residual of tensors that are still trained; that of frozen ones is dropped."""
        super().carry_over(old)
        self._sum = self._sum.carried_over(old, self.parameters, self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Add the residuals, by parameter, and on a GPU the messages' length and beginning."""
        residuals = self.parameters.by_name(self._sum.residual)
        return super().state_dict() | {"residuals": residuals} | self._sum.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError where it is of other settings."""
        super().load_state_dict(state)
        self._sum.restore(self.parameters.flatten(state["residuals"]), state)

    def statistics(self) -> Statistics:
        """Add what was sent, and the norm of what waits in the residual."""
        return super().statistics() | self._sum.statistics()

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Add the residuals, whose sum over the ranks remains, so that no gradient is lost."""
        plan = super().resharding_plan(state)
        return replace(plan, rules={**plan.rules, ("trainer", "residuals"): "sum"})


class Gtc(ThresholdTrainer):
    """Gtc sends +-`gradient_threshold` for the elements whose residual has reached it.

    The papers' 8 is for gradients summed over a 2048-frame minibatch: for a loss divided by 2048 it
    is 8 / 2048.
    """

    record = GtcConfig
    config: GtcConfig

    def exchange_gradients(self) -> None:
        """Replace each gradient by the sum of what all ranks sent, this one included."""
        # A rank applies its own +-tau: its raw gradient would count again through the residual.
        self.parameters.set_gradients(self._sum.of(self.parameters.gradients(), self.group))

    def conclude(self) -> None:
        """Leave the model as it is; raises what the last step's gradients call for."""
        self._sum.check()
