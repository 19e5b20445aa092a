"""Exchange the messages of 1-bit SGD in two stages (paper 004 section 3.1)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from training.algorithms.one_bit.aggregation import RankState, TwoStageAggregation
from training.algorithms.one_bit.quantization import num_message_words
from training.distributed.pending_exchanges import start_all_to_all, start_receive, start_send
from training.distributed.process_group import ProcessGroup


class MessageExchange:
    """MessageExchange makes of all ranks' gradients one update, bitwise the same on all ranks.

    With `is_beside` it sends by tags, so that a thread of its own exchanges while other exchanges
    of the group run. A collective's place in the order of all of them would differ among ranks.
    """

    def __init__(
        self, aggregation: TwoStageAggregation, group: ProcessGroup, *, is_beside: bool
    ) -> None:
        self.aggregation = aggregation
        self.num_bytes = 0
        self.tag = 0
        self._group = group
        self._is_beside = is_beside

    def update(
        self, state: RankState, gradients: Float[Tensor, " elements"], *, is_quantized: bool
    ) -> Float[Tensor, " elements"]:
        """Return the update, and change the rank's state; raises CollectiveError.

        A rank alone quantizes nothing: its gradients need no exchange (004, Table 3, 1 GPU).
        """
        if self._group.size() == 1:
            return self.aggregation.unquantized_update(state, gradients)
        if not is_quantized:
            return self._unquantized_update(state, gradients)
        # All lengths follow from the stripes, so that nothing but messages is sent.
        rank, stripes = self._group.rank(), self.aggregation.stripes
        words = [num_message_words(stripe.columns) for stripe in stripes]
        messages = self.aggregation.take_messages(state, gradients)
        received = self._all_to_all(messages, [words[rank]] * len(stripes))
        aggregate = self.aggregation.take_aggregate(rank, state, received)
        second = self._all_to_all([aggregate] * len(stripes), words)
        return self.aggregation.update(second, gradients)

    def gather(self, stripe: Float[Tensor, " stripe_elements"]) -> Float[Tensor, " elements"]:
        """Return the whole vector of which each rank holds its stripe."""
        sizes = [each.columns.num_elements for each in self.aggregation.stripes]
        return torch.cat(self._all_to_all([stripe] * len(sizes), sizes))

    def _unquantized_update(
        self, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        # The owner of a stripe keeps its momentum, so that quantized steps resume from it.
        parts = self.aggregation.take_parts(state, gradients)
        received = self._all_to_all(parts, [len(state.velocity)] * len(parts))
        return self.gather(self.aggregation.take_sum(state, received))

    def _all_to_all(
        self, parts: Sequence[Shaped[Tensor, " _"]], sizes: Sequence[int]
    ) -> list[Shaped[Tensor, " _"]]:
        own = self._group.rank()
        self.num_bytes += sum(part.nbytes for rank, part in enumerate(parts) if rank != own)
        if not self._is_beside:
            return start_all_to_all(parts, sizes, self._group, "1-bit messages").wait()
        received = [parts[0].new_empty(size) for size in sizes]
        received[own].copy_(parts[own])
        others = [rank for rank in range(len(parts)) if rank != own]
        pending = [
            *(start_send(parts[to], to, self._group, self.tag) for to in others if len(parts[to])),
            *(start_receive(received[of], of, self._group, self.tag) for of in others if sizes[of]),
        ]
        for each in pending:
            each.wait()
        return received
