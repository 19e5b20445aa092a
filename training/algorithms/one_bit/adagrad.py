"""Normalize gradients by AdaGrad, at the four places of paper 004 section 5.3."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from infra.ranges import Range, check_ranges


class AdaGradPlace(StrEnum):
    """AdaGradPlace is a row of Table 3, or no AdaGrad, as in Table 2.

    `AGGREGATE`, the paper's choice, normalizes the sum of the quantized gradients before momentum,
    `SMOOTHED` the sum after it: both act on a rank's stripe. `PARTIAL` normalizes each rank's own
    gradients before they are quantized. `RAW` does so on a single rank, which quantizes nothing.
    """

    AGGREGATE = "aggregate"
    SMOOTHED = "smoothed"
    PARTIAL = "partial"
    RAW = "raw"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class AdaGradState:
    """AdaGradState is the sum of the squares of each element's gradients, and of their weights.

    `normalize` changes both tensors in place.
    """

    squares: Float[Tensor, " elements"]
    weight: Float64[Tensor, ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGrad:
    """AdaGrad divides gradients by their standard deviation about 0 (004 4).

    With `decay` 1 it is that "over time": sqrt(t) times Duchi's AdaGrad, whose 1 / sqrt(t) is left
    to the learning rate's schedule. With a smaller decay it is that of "recent samples".
    """

    place: AdaGradPlace = AdaGradPlace.AGGREGATE
    decay: Annotated[float, Range(1e-3, 1)] = 1.0
    epsilon: Annotated[float, Range(1e-30, 1)] = 1e-10

    __post_init__ = check_ranges

    def begin(
        self,
        rank: Float[Tensor, " rank_elements"],
        stripe: Float[Tensor, " stripe_elements"],
    ) -> AdaGradState:
        """Return the state before the first step, as long as what the place normalizes.

        `rank` and `stripe` are vectors as long as a rank's gradients, and as its stripe.
        """
        lengths = {
            AdaGradPlace.AGGREGATE: len(stripe),
            AdaGradPlace.SMOOTHED: len(stripe),
            AdaGradPlace.PARTIAL: len(rank),
            AdaGradPlace.RAW: len(rank),
            AdaGradPlace.NOWHERE: 0,
        }
        weight = torch.zeros((), dtype=torch.float64, device=rank.device)
        return AdaGradState(rank.new_zeros(lengths[self.place]), weight)

    def at(
        self, place: AdaGradPlace, state: AdaGradState, gradients: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        """Return the gradients, normalized if this is the place for it."""
        return self.normalize(state, gradients) if place is self.place else gradients

    def normalize(
        self, state: AdaGradState, gradients: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        """Count the gradients in, then return g / (sqrt(mean of g^2) + epsilon)."""
        state.weight.mul_(self.decay).add_(1)
        state.squares.mul_(self.decay).addcmul_(gradients, gradients)
        deviation = (state.squares / state.weight).sqrt_().add_(self.epsilon)
        return gradients / deviation
