"""Report what trainers do, as plain numbers that a loop may log (003 VI-C tunes by these)."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousStatistics:
    """SynchronousStatistics: steps of the training, and bytes that this process gave to exchanges.

    A message counts once, however many ranks receive it. Checks and checkpoints do not count.
    """

    num_steps: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GtcStatistics:
    """GtcStatistics adds to `SynchronousStatistics` what becomes of this rank's gradients.

    `density` is the share of gradient elements whose residual reached the threshold. A Euclidean
    `residual_norm` that keeps growing means a threshold too small at a high density, as an element
    sends the threshold once a step at most, and one too large at a density near 0.
    """

    num_steps: int
    bytes_sent: int
    num_elements: int
    num_elements_sent: int
    density: float
    residual_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BmufStatistics:
    """BmufStatistics adds to `SynchronousStatistics` the blocks, and the last one's update.

    `block_update_norm` is the Euclidean norm of the filtered update Delta(t) of 000 eq. (3),
    `block_residual_norm` that of the changes that this rank's messages have not sent yet.
    """

    num_steps: int
    bytes_sent: int
    num_blocks: int
    block_update_norm: float
    block_residual_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmStatistics:
    """HtmStatistics holds GTC's numbers of this rank's group, and BMUF's of the groups."""

    num_steps: int
    bytes_sent: int
    num_elements: int
    num_elements_sent: int
    density: float
    residual_norm: float
    num_blocks: int
    block_update_norm: float
    block_residual_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdPsgdStatistics:
    """AdPsgdStatistics adds to `SynchronousStatistics` the exchanges that moved this rank's model.

    A step's staleness is the number of exchanges between the read of its gradient's weights and
    the step. `num_busy` counts the offers that this rank has declined to bound it.
    """

    num_steps: int
    bytes_sent: int
    num_exchanges: int
    num_busy: int
    mean_staleness: float
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitStatistics:
    """OneBitStatistics adds to `SynchronousStatistics` what waits in both residuals of this rank.

    `bytes_sent` are all that left it: a stripe's update goes to each other rank, and counts so.
    `residual_norm` is that of the rank's gradients, `stripe_residual_norm` that of its stripe.
    """

    num_steps: int
    bytes_sent: int
    residual_norm: float
    stripe_residual_norm: float


Statistics: TypeAlias = (
    SynchronousStatistics
    | GtcStatistics
    | BmufStatistics
    | HtmStatistics
    | OneBitStatistics
    | AdPsgdStatistics
)
S = TypeVar("S", bound=Statistics)

COUNTS = (
    *("num_steps", "bytes_sent", "num_elements", "num_elements_sent", "num_blocks"),
    *("num_exchanges", "num_busy"),
)


def between(earlier: S, later: S) -> S:
    """Return the statistics of the steps between two moments; norms are those of the later."""
    names = {field.name for field in fields(later)}
    changes: dict[str, Any] = {
        name: getattr(later, name) - getattr(earlier, name) for name in COUNTS if name in names
    }
    if "density" in names:
        changes["density"] = density(changes["num_elements_sent"], changes["num_elements"])
    return replace(later, **changes)


def density(num_sent: int, num_elements: int) -> float:
    """Return the share of elements that were sent; 0 of none."""
    return num_sent / num_elements if num_elements else 0.0


def norm_of(values: Float[Tensor, " elements"]) -> float:
    """Return the Euclidean norm; the host waits for the device."""
    return float(torch.linalg.vector_norm(values))
