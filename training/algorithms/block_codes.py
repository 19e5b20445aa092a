"""Name the ways to send what a model's block changed: exactly, rounded, or the largest parts."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from infra.ranges import Range, check_ranges
from training.algorithms.sparsification.top_k import TopK


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Exact: float32, as both papers send models."""

    name: Literal["exact"] = "exact"

    has_residual: ClassVar[bool] = False
    """Whether what is not sent now is kept for later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bfloat16:
    """Bfloat16: half the bytes; the rounding, 1/512 of an element, is lost."""

    name: Literal["bfloat16"] = "bfloat16"

    has_residual: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Threshold: GTC's code of a block's change, whose density follows the data (003 VI-A).

    Elements whose residual has reached `change_threshold` send that much, and keep the rest.
    """

    name: Literal["threshold"] = "threshold"
    change_threshold: Annotated[float, Range(1e-12, 1e9)] = 0.01

    has_residual: ClassVar[bool] = True

    __post_init__ = check_ranges


BlockCode: TypeAlias = Exact | Bfloat16 | TopK | Threshold

EXACT = Exact()
