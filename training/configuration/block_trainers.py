"""The settings of the trainers that exchange models after blocks of steps (003 VI-B, 000 2)."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from infra.settings import LATER, Range, check_ranges
from training.configuration.block_codes import EXACT, Bits, BlockCode, Density, ErrorDecay

GradientThreshold = Annotated[float, Range(1e-12, 1e9, zero="unquantized gradients")]


Form = Literal["nesterov", "as_printed"]


OptimizerState = Literal["keep", "average", "reset"]
"""Treatments of the optimizer's moments at a block's end."""


def block_momentum_for(
    num_models: int, block_learning_rate: float, momentum_constant: float
) -> float:
    """Compute eta from zeta / (N (1 - eta)) = C (000 eq. 5); N is the number of averaged models."""
    if not (momentum_constant > 0 and momentum_constant * num_models >= block_learning_rate):
        raise ValueError(
            f"momentum_constant = {momentum_constant}: need at least block_learning_rate / N = "
            f"{block_learning_rate} / {num_models}, or the block momentum is negative"
        )
    return 1 - block_learning_rate / (num_models * momentum_constant)


def num_groups(num_ranks: int, group_size: int, setting: str = "group_size") -> int:
    """Count the groups of so many ranks; ValueError if one would have fewer than the others."""
    if not (group_size >= 1 and num_ranks % group_size == 0):
        raise ValueError(
            f"{setting} = {group_size}: need a divisor of {num_ranks}, the number of ranks"
        )
    return num_ranks // group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """BlockConfig: zeta, and C of eq. (5); the defaults are those of paper 000 3.2.

    A `block_momentum` takes the place of eq. (5) and its C; 0 is model averaging.
    """

    block_size: Annotated[int, Range(1, 1_000_000)] = 50
    block_learning_rate: Annotated[float, Range(1e-6, 1000)] = 1.0
    momentum_constant: Annotated[float, Range(1e-6, 1000)] = 1.0
    block_momentum: Annotated[float, Range(0, 1, below=True)] | None = field(
        default=None, metadata=LATER
    )
    form: Form = field(default="nesterov", metadata=LATER)
    optimizer_state: OptimizerState = field(default="keep", metadata=LATER)
    block_exchange: BlockCode = field(default=EXACT, metadata=LATER)

    __post_init__ = check_ranges

    @property
    def num_block_vectors(self) -> int:
        """Count both models of a block, the filtered update, and a code's residual."""
        return 3 + self.block_exchange.has_residual

    def block_settings(self) -> dict[str, Any]:
        """Return these fields, which BMUF and HTM take by their names."""
        return {each.name: getattr(self, each.name) for each in fields(BlockConfig)}

    def check_models(self, num_models: int) -> None:
        """Raise ValueError if eq. (5) gives so many models a block momentum below 0."""
        if self.block_momentum is None:
            block_momentum_for(num_models, self.block_learning_rate, self.momentum_constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class BmufConfig(BlockConfig):
    """BMUF: the models of all ranks are averaged after every block of steps, and filtered."""

    name: Literal["bmuf"] = "bmuf"
    ranks_per_leader: Annotated[int, Range(1, 1_000_000, zero="a host's ranks")] = field(
        default=1, metadata=LATER
    )

    @property
    def num_state_vectors(self) -> int:
        """Count the vectors of the model's size in the trainer's state."""
        return self.num_block_vectors

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks have no leaders, or a block momentum below 0."""
        num_groups(num_ranks, self.ranks_per_leader or ranks_per_host, "ranks_per_leader")
        self.check_models(num_ranks)

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group."""
        return {**self.block_settings(), "ranks_per_leader": self.ranks_per_leader or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmConfig(BlockConfig):
    """HTM: GTC within groups of ranks, BMUF across the groups; `group_size` 0: a host's ranks.

    The default threshold is for gradients summed over minibatches of 2048 frames (000 3.2).
    """

    name: Literal["htm"] = "htm"
    # Groups of 8 ranks and tau = 2 are the paper's; GTC alone has tau = 8.
    gradient_threshold: GradientThreshold = 2.0
    group_size: Annotated[int, Range(1, 1_000_000, zero="a host's ranks")] = 0

    @property
    def num_state_vectors(self) -> int:
        """Count BMUF's vectors of the model's size, and GTC's residual."""
        return self.num_block_vectors + 1

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks make no equal groups, or a block momentum below 0."""
        self.check_models(num_groups(num_ranks, self.group_size or ranks_per_host))

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group."""
        own = {"group_size": self.group_size or None, "gradient_threshold": self.gradient_threshold}
        return {**self.block_settings(), **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLocoConfig:
    """SparseLoCo: after a block of steps, ranks average the largest parts of their changes."""

    name: Literal["sparse_loco"] = "sparse_loco"
    block_size: Annotated[int, Range(1, 1_000_000)] = 50
    density: Density = 0.03
    bits: Bits = 2
    error_decay: ErrorDecay = 0.95
    outer_learning_rate: Annotated[float, Range(1e-6, 1000)] = 1.0
    ranks_per_leader: Annotated[int, Range(1, 1_000_000, zero="a host's ranks")] = 1

    num_state_vectors: ClassVar[int] = 4
    """BMUF's three, and the residual."""

    __post_init__ = check_ranges

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks have no leaders."""
        num_groups(num_ranks, self.ranks_per_leader or ranks_per_host, "ranks_per_leader")

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group."""
        return {
            "block_size": self.block_size,
            "density": self.density,
            "bits": self.bits,
            "error_decay": self.error_decay,
            "outer_learning_rate": self.outer_learning_rate,
            "ranks_per_leader": self.ranks_per_leader or None,
        }
