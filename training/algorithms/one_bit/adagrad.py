"""Normalize gradients by AdaGrad, at the four places of paper 004 section 5.3."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from training.configuration.trainers import AdaGrad, AdaGradPlace


@dataclass(frozen=True, slots=True)
class AdaGradState:
    """AdaGradState is the sum of the squares of each element's gradients, and of their weights.

    `normalized` changes both tensors in place.
    """

    squares: Float[Tensor, " elements"]
    weight: Float64[Tensor, ""]


def first_state(
    adagrad: AdaGrad,
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
    return AdaGradState(rank.new_zeros(lengths[adagrad.place]), weight)


def normalized_at(
    place: AdaGradPlace,
    adagrad: AdaGrad,
    state: AdaGradState,
    gradients: Float[Tensor, " elements"],
) -> Float[Tensor, " elements"]:
    """Return the gradients, normalized if this is the place for it."""
    return normalized(adagrad, state, gradients) if place is adagrad.place else gradients


def normalized(
    adagrad: AdaGrad, state: AdaGradState, gradients: Float[Tensor, " elements"]
) -> Float[Tensor, " elements"]:
    """Count the gradients in, then return g / (sqrt(mean of g^2) + epsilon)."""
    state.weight.mul_(adagrad.decay).add_(1)
    state.squares.mul_(adagrad.decay).addcmul_(gradients, gradients)
    deviation = (state.squares / state.weight).sqrt_().add_(adagrad.epsilon)
    return gradients / deviation
