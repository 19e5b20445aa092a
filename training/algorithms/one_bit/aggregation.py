"""Aggregate the ranks' gradients in two quantized stages (paper 004 section 3.1).

Each rank aggregates a stripe of the parameters. One training step of a rank is

    take_messages   one message for each rank, about that rank's stripe: send the k-th to rank k
    take_aggregate  from the messages received, one from each rank: send the new one to all ranks
    update          from all ranks' second messages, the update that every rank applies

A trainer only moves the messages' bytes, whose lengths `num_message_words` tells in advance. A
training that begins without quantization (5.2) has `take_parts` and `take_sum` in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from infra.settings import Range, check_ranges
from training.algorithms.one_bit.adagrad import AdaGradState, first_state, normalized_at
from training.algorithms.one_bit.columns import Stripe
from training.algorithms.one_bit.quantization import add_message, take_message
from training.configuration.trainers import AdaGrad, AdaGradPlace


@dataclass(frozen=True, slots=True)
class RankState:
    """RankState is what a rank carries from one training step to the next, changed in place.

    `residual` is the first quantization's, of all elements. `stripe_residual` is the second's, and
    `velocity` the momentum, of the elements of the rank's stripe.
    """

    residual: Float[Tensor, " elements"]
    stripe_residual: Float[Tensor, " stripe_elements"]
    velocity: Float[Tensor, " stripe_elements"]
    adagrad: AdaGradState


@dataclass(frozen=True, slots=True)
class TwoStageAggregation:
    """TwoStageAggregation sums gradients, normalizes and smooths the sum, and quantizes it again.

    Momentum is v = momentum v + g, as torch's SGD has it. A smoothing with a factor 1 - momentum
    before g differs by that factor alone, which belongs to the learning rate.
    """

    stripes: tuple[Stripe, ...]
    momentum: Annotated[float, Range(0, 1, below=True)] = 0.9
    adagrad: AdaGrad = field(default_factory=AdaGrad)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.adagrad.place is AdaGradPlace.RAW and len(self.stripes) > 1:
            raise ValueError(
                f"AdaGrad of the raw gradient on {len(self.stripes)} ranks: need 1 rank, or the "
                "place 'partial' or 'aggregate'"
            )

    def begin(self, rank: int, model: Float[Tensor, " elements"]) -> RankState:
        """Return a rank's state before its first step, on the device of the `model` vector."""
        stripe = self.stripes[rank].of(model)
        return RankState(
            torch.zeros_like(model),
            torch.zeros_like(stripe),
            torch.zeros_like(stripe),
            first_state(self.adagrad, model, stripe),
        )

    def take_messages(
        self, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> list[Int32[Tensor, " _"]]:
        """Quantize a rank's gradients for each rank that aggregates them, itself included."""
        gradients = self._normalized(AdaGradPlace.PARTIAL, state, gradients)
        return [
            take_message(stripe.of(state.residual), stripe.of(gradients), stripe.columns)
            for stripe in self.stripes
        ]

    def take_aggregate(
        self, rank: int, state: RankState, messages: Sequence[Int32[Tensor, " words"]]
    ) -> Int32[Tensor, " words"]:
        """Sum all ranks' messages about a rank's stripe, in their order; quantize the result.

        The sum is the only one of its stripe, so the ranks' models remain equal bit for bit.
        """
        columns, total = self.stripes[rank].columns, torch.zeros_like(state.velocity)
        for message in messages:
            add_message(total, message, columns)
        return take_message(state.stripe_residual, self._processed(state, total), columns)

    def update(
        self, messages: Sequence[Int32[Tensor, " _"]], like: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        """Return the update from the second messages of ranks 0, 1, ..., in a vector as `like`."""
        update = torch.zeros_like(like)
        for stripe, message in zip(self.stripes, messages, strict=True):
            add_message(stripe.of(update), message, stripe.columns)
        return update

    def take_parts(
        self, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> list[Float[Tensor, " _"]]:
        """Return a rank's gradients for each rank that aggregates them, without quantization."""
        gradients = self._normalized(AdaGradPlace.PARTIAL, state, gradients)
        return [stripe.of(gradients) for stripe in self.stripes]

    def take_sum(
        self, state: RankState, parts: Sequence[Float[Tensor, " stripe_elements"]]
    ) -> Float[Tensor, " stripe_elements"]:
        """Return a stripe's update from all ranks' parts, without quantization, in their order.

        AdaGrad's and the momentum's state are the same as of a quantized step; residuals remain.
        """
        total = torch.zeros_like(state.velocity)
        for part in parts:
            total.add_(part)
        return self._processed(state, total).clone()

    def unquantized_update(
        self, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        """Return a single rank's update, in which nothing is quantized (Table 3, 1 GPU).

        It takes up both residuals, which resharding may have left of more ranks.
        """
        assert len(self.stripes) == 1
        gradients = self._normalized(AdaGradPlace.RAW, state, gradients)
        parts = [*self.take_parts(state, gradients), state.residual]
        update = self.take_sum(state, parts).add_(state.stripe_residual)
        state.residual.zero_()
        state.stripe_residual.zero_()
        return update

    def _processed(
        self, state: RankState, total: Float[Tensor, " stripe_elements"]
    ) -> Float[Tensor, " stripe_elements"]:
        """Return the update before the second quantization: AdaGrad, momentum (004 3.1)."""
        total = self._normalized(AdaGradPlace.AGGREGATE, state, total)
        state.velocity.mul_(self.momentum).add_(total)
        return self._normalized(AdaGradPlace.SMOOTHED, state, state.velocity)

    def _normalized(
        self, place: AdaGradPlace, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        return normalized_at(place, self.adagrad, state.adagrad, gradients)
