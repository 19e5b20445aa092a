"""The settings of each trainer (003 VI, 000 2, 004, 001), by the names that recipes give them."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from infra.settings import TAG, Range, check_ranges
from training.configuration.block_trainers import (
    BmufConfig,
    GradientThreshold,
    HtmConfig,
    SparseLocoConfig,
)
from training.configuration.optimizers import OptimizerConfig, SgdConfig
from training.configuration.values import Precision

MixingSeed: TypeAlias = Annotated[int, Range(0, 2**63 - 1)]
"""A recipe's seed of what all ranks draw alike: permutations, partners."""


@dataclass(frozen=True, slots=True)
class SynchronousConfig:
    """Synchronous SGD: every step applies the sum of all ranks' gradients."""

    name: Literal["synchronous"] = "synchronous"

    num_state_vectors: ClassVar[int] = 0
    """Vectors of the model's size in the trainer's state."""

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Accept any number of ranks."""

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group: nothing."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GtcConfig:
    """GTC: each rank sends +-gradient_threshold, for gradients summed over a minibatch.

    The default is that of both papers, for minibatches of 2048 frames (003 VI-C, 000 3.2).
    """

    name: Literal["gtc"] = "gtc"
    gradient_threshold: GradientThreshold = 8.0

    num_state_vectors: ClassVar[int] = 1
    """The residual."""

    __post_init__ = check_ranges

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Accept any number of ranks."""

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group."""
        return {"gradient_threshold": self.gradient_threshold}


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


ON_AGGREGATE = AdaGrad()
"""The paper's choice (004 5.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitConfig:
    """1-bit SGD: each rank sends one bit an element; its optimizer is SGD without momentum.

    `momentum` and `adagrad` are the trainer's. With `double_buffering` a minibatch is half of one.
    """

    name: Literal["one_bit"] = "one_bit"
    momentum: Annotated[float, Range(0, 1, below=True)] = 0.9
    adagrad: AdaGrad = ON_AGGREGATE
    num_unquantized_steps: Annotated[int, Range(0, 1_000_000_000)] = 0
    double_buffering: bool = False

    num_state_vectors: ClassVar[int] = 5
    """On one rank: both residuals, momentum, squares and an update that waits."""

    __post_init__ = check_ranges

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError for AdaGrad of the raw gradient on several ranks."""
        del ranks_per_host
        if self.adagrad.place is AdaGradPlace.RAW and num_ranks > 1:
            raise ValueError(
                f"adagrad.place = 'raw' on {num_ranks} ranks: need 1 rank, or 'partial' or "
                "'aggregate'"
            )

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != TAG}


@dataclass(frozen=True, slots=True)
class DPsgdConfig:
    """D-PSGD: each rank averages its model with its two neighbours' on a ring in every step."""

    name: Literal["d_psgd"] = "d_psgd"

    num_state_vectors: ClassVar[int] = 3
    """The message, and both neighbours' models."""

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Accept any number of ranks."""

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group: nothing."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandPsgdConfig:
    """RAND-PSGD: D-PSGD on a ring whose order is drawn in every step, from `mixing_seed`."""

    name: Literal["rand_psgd"] = "rand_psgd"
    mixing_seed: MixingSeed = 0

    num_state_vectors: ClassVar[int] = 3
    """What is sent, and both neighbours' models."""

    __post_init__ = check_ranges

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Accept any number of ranks."""

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group."""
        return {"seed": self.mixing_seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdPsgdConfig:
    """AD-PSGD: pairs of ranks average their models whenever they can, and no rank waits."""

    name: Literal["ad_psgd"] = "ad_psgd"
    mixing_seed: MixingSeed = 0
    max_staleness: Annotated[int, Range(1, 1_000_000)] = 16

    num_state_vectors: ClassVar[int] = 6
    """The model, its own steps, the weights that were read, and the messages of an exchange."""

    __post_init__ = check_ranges

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Accept any number of ranks."""

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group."""
        return {"seed": self.mixing_seed, "max_staleness": self.max_staleness}


@dataclass(frozen=True, slots=True)
class D1dPsgdConfig:
    """D1D-PSGD: an all-reduce of the models runs while gradients of the last mean are computed."""

    name: Literal["d1d_psgd"] = "d1d_psgd"

    num_state_vectors: ClassVar[int] = 3
    """The rank's own model, its sum, and the mean before."""

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Accept any number of ranks."""

    def arguments(self) -> dict[str, Any]:
        """Return what the trainer takes beside model, optimizer and group: nothing."""
        return {}


TrainerConfig: TypeAlias = (
    SynchronousConfig
    | GtcConfig
    | BmufConfig
    | HtmConfig
    | OneBitConfig
    | SparseLocoConfig
    | DPsgdConfig
    | AdPsgdConfig
    | RandPsgdConfig
    | D1dPsgdConfig
)


TRAINERS: Mapping[str, type[TrainerConfig]] = {
    config().name: config for config in get_args(TrainerConfig)
}
"""The configuration of each trainer, by the name that recipes give it."""


def check_optimizer(trainer: TrainerConfig, optimizer: OptimizerConfig) -> None:
    """Raise ValueError where a recipe gives a trainer an optimizer that it cannot work with."""
    if isinstance(trainer, OneBitConfig) and optimizer != SgdConfig(momentum=0.0):
        raise ValueError(
            f"optimizer = {optimizer}: the trainer one_bit has momentum and AdaGrad itself: need "
            'optimizer = { name = "sgd", momentum = 0 }, and trainer.momentum for the momentum'
        )


TRAINERS_OF_GROUPS = ("htm",)
"""Trainers that divide the ranks of a world, which those of one part are not."""


def check_model_parallel(num_parts: int, trainer: TrainerConfig, precision: Precision) -> None:
    """Raise ValueError where a divided model cannot be trained so."""
    if num_parts == 1:
        return
    said = f"model_parallel_ranks = {num_parts}"
    if precision != "float32":
        raise ValueError(f"{said}: precision = {precision!r}: need 'float32'")
    if trainer.name in TRAINERS_OF_GROUPS or getattr(trainer, "ranks_per_leader", 1) != 1:
        raise ValueError(
            f"{said}: trainer {trainer.name!r} divides ranks into groups itself: need one without "
            "groups and with ranks_per_leader = 1, such as 'one_bit'"
        )


def data_parallel_ranks(num_ranks: int, num_parts: int) -> int:
    """Return how many ranks hold the same units; ValueError where a rank would be left over."""
    if num_ranks % num_parts:
        raise ValueError(
            f"model_parallel_ranks = {num_parts}: need a divisor of {num_ranks}, the ranks"
        )
    return num_ranks // num_parts


def describe_trainers() -> str:
    """Say in a sentence each what the trainers do, for a job's help."""
    summaries = ((inspect.getdoc(config) or "").splitlines()[0] for config in TRAINERS.values())
    return " ".join(summaries)


def with_trainer(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Name another trainer in a recipe's table, without the settings that only others have.

    A key that no trainer has stays, to be refused with the recipe.
    """
    settings = {
        trainer: {field.name for field in fields(TRAINERS[trainer])} for trainer in TRAINERS
    }
    surplus = set().union(*settings.values()) - settings[name]
    return {key: value for key, value in table.items() if key not in surplus} | {TAG: name}


def put_trainer(section: dict[str, Any], name: str) -> None:
    """Name another trainer in a recipe's section; 1-bit SGD brings the optimizer that it needs."""
    section["trainer"] = with_trainer(section.get("trainer", {}), name)
    if TRAINERS[name] is OneBitConfig:
        section["optimizer"] = {TAG: SgdConfig().name, "momentum": 0.0}
