"""Name the ways to send what a model's block changed: exactly, rounded, or the largest parts."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from infra.settings import Range, check_ranges


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


Density = Annotated[float, Range(1e-5, 1)]


Bits = Annotated[int, Range(2, 8)]


ErrorDecay = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """TopK: a chunk's largest elements, with error feedback (SparseLoCo, arXiv 2508.15706).

    The residual becomes error_decay residual + change, less what is sent of it.
    """

    name: Literal["top_k"] = "top_k"
    density: Density = 0.03
    bits: Bits = 2
    error_decay: ErrorDecay = 0.95

    has_residual: ClassVar[bool] = True
    """Whether what is not sent now is kept for later."""

    __post_init__ = check_ranges

    @property
    def num_cells(self) -> int:
        """Return the number of cells of magnitudes."""
        return 1 << self.bits - 1

    def num_kept(self, num_elements: int) -> int:
        """Return the number of elements that a chunk of so many sends, at least 1."""
        return math.ceil(self.density * num_elements)


BlockCode: TypeAlias = Exact | Bfloat16 | TopK | Threshold

EXACT = Exact()
