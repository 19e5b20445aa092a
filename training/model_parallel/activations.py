"""Exchange the activations of a layer whose units are divided among ranks, and their gradients."""

from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from training.distributed.pending_exchanges import start_all_to_all
from training.distributed.process_group import ProcessGroup

Readers = Literal["own units", "all units"]
"""What a rank computes from the gathered activations: its own units of the next layer, or all."""


def unit_bounds(num_units: int, num_ranks: int) -> list[int]:
    """Return where each rank's units begin, and the end; their numbers differ by one at most."""
    if num_units < num_ranks:
        raise ValueError(f"a layer of {num_units} units on {num_ranks} ranks: need one for each")
    return [rank * num_units // num_ranks for rank in range(num_ranks + 1)]


def gather_units(
    own: Float[Tensor, "... own_units"], num_units: int, group: ProcessGroup, readers: Readers
) -> Float[Tensor, "... units"]:
    """Return the activations of all ranks' units, the same bits on all ranks.

    Where ranks read them for their "own units", each rank's gradient is a part of the whole, and
    the parts are summed in rank order. Where each computes "all units", each has the whole.
    """
    gathered: Tensor = _Gather.apply(own, num_units, group, readers)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        own: Float[Tensor, "... own_units"],
        num_units: int,
        group: ProcessGroup,
        readers: Readers,
    ) -> Float[Tensor, "... units"]:
        bounds = unit_bounds(num_units, group.size())
        ctx.bounds, ctx.group, ctx.readers = bounds, group, readers  # type: ignore[attr-defined]
        rows = own.numel() // own.shape[-1]
        sizes = [rows * (end - first) for first, end in pairwise(bounds)]
        parts = [own.reshape(-1)] * group.size()
        received = start_all_to_all(parts, sizes, group, "activations").wait()
        return torch.cat([part.view(*own.shape[:-1], -1) for part in received], dim=-1)

    @staticmethod
    def backward(
        ctx: FunctionCtx, gradient: Float[Tensor, "... units"]
    ) -> tuple[Tensor, None, None, None]:
        bounds: list[int] = ctx.bounds  # type: ignore[attr-defined]
        group: ProcessGroup = ctx.group  # type: ignore[attr-defined]
        slices = [gradient[..., first:end] for first, end in pairwise(bounds)]
        own = slices[group.rank()]
        if ctx.readers == "own units":  # type: ignore[attr-defined]
            parts = [each.reshape(-1) for each in slices]
            sizes = [own.numel()] * group.size()
            received = start_all_to_all(parts, sizes, group, "gradients of activations").wait()
            own = torch.stack(received).sum(0).view(own.shape)
        return own, None, None, None
