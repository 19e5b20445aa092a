"""Ensemble of teachers: the mean of several models' posteriors over the senones."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

Member: TypeAlias = Callable[
    [list[Float32[Tensor, "_frames _values"]]], list[Float32[Tensor, "_frames senones"]]
]
"""Utterances on a device to their logits, such as a model's `utterance_logits`."""


def log_mean_posteriors(
    members: Sequence[Float[Tensor, "frames senones"]],
) -> Float64[Tensor, "frames senones"]:
    """Return log of (1 / M) sum_m softmax(logits_m), frame by frame, from M members' logits."""
    total = torch.log_softmax(members[0].double(), dim=-1)
    for logits in members[1:]:
        # Sums of float64 differ by 1e-15 between orders of members.
        total = torch.logaddexp(total, torch.log_softmax(logits.double(), dim=-1))
    return total - math.log(len(members))


def relative_logits(
    log_posteriors: Float64[Tensor, "frames senones"],
) -> Float32[Tensor, "frames senones"]:
    """Subtract each frame's largest, so that float32 is fine where the probability is."""
    # The k best of float64 take a core 4 times as long, which one core does for a whole GPU.
    return (log_posteriors - log_posteriors.amax(dim=-1, keepdim=True)).float()


def ensemble_logits(
    members: Sequence[Member], utterances: list[Float32[Tensor, "_frames _values"]]
) -> list[Float32[Tensor, "_frames senones"]]:
    """Return the logits of one member, or log of the mean posteriors of several, by utterance.

    The members compute one after another; beside their weights, the float32 logits of all of them
    are in memory, and of one utterance at a time some float64 copies.
    """
    by_member = [label(utterances) for label in members]
    # Alone, a member's logits keep their bits.
    if len(members) == 1:
        return by_member[0]
    means = (log_mean_posteriors(each) for each in zip(*by_member, strict=True))
    return [relative_logits(mean) for mean in means]
